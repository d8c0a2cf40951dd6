"""Text to ids and ids to text by a tokenizer.json, without transformers, which would load torch into a front end.

A *special* token is an added token that tokenizer.json (or the token names of tokenizer_config.json) calls special, one
that skip_special_tokens leaves out. Other added tokens, such as Qwen's <think>, are ordinary vocabulary that happens to
be matched first.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from photon_grpc.errors import InvalidRequest, ModelLoadError, PromptTooLong
from photon_grpc.frontend.input.markers import Markers, SpecialTokenEscaper
from photon_grpc.frontend.input.text_bounds import bytes_per_token
from photon_grpc.frontend.output.detokenizer import Detokenizer, Vocabulary, make_vocabulary

#: A list of so many ids more than the context holds takes no time.
_MAX_SURPLUS = 1000


class Tokenizer:
    """The tokenizer of a model. It is immutable and safe to use from several threads; encoding releases the GIL."""

    def __init__(self, definition: str | bytes, token_names: Mapping[str, str] | None = None) -> None:
        """Load `definition`, the content of tokenizer.json, with `token_names` such as {"eos_token": "</s>"}.

        Raise ModelLoadError if the library cannot read it.
        """
        self.token_names = dict(token_names or {})
        #: Parses the spellings of special tokens, as transformers does.
        self._parsing = _load(definition, self.token_names.values())
        spec = json.loads(self._parsing.to_str())
        special = {t.content: id for id, t in self._parsing.get_added_tokens_decoder().items() if t.special}
        self.special_ids = frozenset(special.values())
        self.markers = Markers(special)
        # Special tokens of the other instance begin with this unguessable sign, so that no text spells one.
        self._sign = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(8))
        self._plain = _load(json.dumps(respelled(spec, self._sign)), ())
        self._check_ids()
        self._bytes_per_token = bytes_per_token(spec)
        added, plain = (self._parsing.encode("a", add_special_tokens=add).ids[:1] for add in (True, False))
        #: The id that is added before a text; None: none is.
        self._bos_id = added[0] if added != plain else None
        # Such a token absorbs any amount of white space beside it.
        self._strips_space = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        self._vocabularies: dict[bool, Vocabulary] = {
            skip: make_vocabulary(spec, self._parsing, self.special_ids if skip else frozenset())
            for skip in (True, False)
        }

    @classmethod
    def from_file(cls, path: Path, token_names: Mapping[str, str] | None = None) -> Tokenizer:
        """Load a tokenizer.json. Raise ModelLoadError."""
        try:
            return cls(path.read_bytes(), token_names)
        except OSError as error:
            raise ModelLoadError(f"{path.name}: cannot be read ({error})") from None

    def max_bytes(self, num_tokens: int) -> int | None:
        """Return the most UTF-8 bytes that `num_tokens` ids can stand for, None if the tokenizer may drop text.

        White space beside tokens that strip it does not count.
        """
        return None if self._bytes_per_token is None else num_tokens * self._bytes_per_token

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        max_tokens: int | None = None,
        field: str = "text",
    ) -> tuple[int, ...]:
        """Return the ids of plain text. Call it in a thread, since long texts take long.

        With `add_special_tokens`, add BOS and whatever else the tokenizer puts around a text. With
        `parse_special_tokens`, spellings of special tokens become those tokens; a text that begins with BOS,
        as a rendered chat does, gets no second one. Raise PromptTooLong if the text has
        more than `max_tokens` ids, without encoding it if its length shows that, and InvalidRequest naming `field` if
        it is not Unicode.
        """
        self._check_text(text, max_tokens, field)
        tokenizer = self._parsing if parse_special_tokens else self._plain
        single_id = self._bos_id if add_special_tokens and parse_special_tokens else None
        return _ids(tokenizer, text, add_special_tokens, max_tokens, field, single_id)

    def escaper(self, strings: Iterable[str]) -> SpecialTokenEscaper:
        """Return an escaper of a chat template's `strings`, which `encode_template` undoes.

        Its stand-ins differ from the characters of the sign that marks special tokens.
        """
        return SpecialTokenEscaper(self.markers, (self._sign, *strings))

    def encode_template(
        self, text: str, escaper: SpecialTokenEscaper, *, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Return the ids of a rendered chat template, without adding special tokens around it.

        Spellings of special tokens that are not escaped become those tokens.
        """
        self._check_text(text, max_tokens, "chat")
        marked = escaper.unescape(self.markers.mark(text, self._sign))
        return _ids(self._plain, marked, False, max_tokens, "chat")

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for ids that follow `prompt_ids`, whose text is not repeated."""
        return self._vocabularies[skip_special_tokens].detokenizer(prompt_ids)

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes of a token, even a special one, perhaps part of a character; b"" for an id without a token."""
        return self._vocabularies[False].token_bytes

    @property
    def max_token_bytes(self) -> int:
        """An upper bound of the bytes of a token."""
        return self._vocabularies[False].max_token_bytes

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids that nothing precedes."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(id) for id in token_ids]) + detokenizer.finish()

    def _check_text(self, text: str, max_tokens: int | None, field: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds a lone surrogate, which is not Unicode", field=field) from None
        if self._sign in text:
            raise InvalidRequest("the text holds characters that this server reserves", field=field)
        if max_tokens is None or self._bytes_per_token is None:
            return
        if num_bytes > max_tokens * self._bytes_per_token and self._strips_space:
            num_bytes = sum(len("".join(text[i : i + 2**16].split()).encode()) for i in range(0, len(text), 2**16))
        if num_bytes > max_tokens * self._bytes_per_token:
            at_least = -(-num_bytes // self._bytes_per_token)
            message = f"the text has {num_bytes} bytes, at least {at_least} tokens; the context holds {max_tokens}"
            raise PromptTooLong(message, field=field, needed=at_least, limit=max_tokens)

    def _check_ids(self) -> None:
        for id, token in self._parsing.get_added_tokens_decoder().items():
            content = self._sign + token.content if token.special else token.content
            if self._plain.token_to_id(content) != id:
                raise ModelLoadError(
                    f"tokenizer.json: the added token {token.content!r} has an id other than its place gives it"
                )


def _ids(
    tokenizer: tokenizers.Tokenizer,
    text: str,
    add_special_tokens: bool,
    max_tokens: int | None,
    field: str,
    single_id: int | None = None,
) -> tuple[int, ...]:
    """Return the ids. If the text begins with `single_id`, none is added before it."""
    # Only the batch calls release the GIL.
    encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    if max_tokens is not None and len(encoding) > max_tokens + _MAX_SURPLUS:
        raise _too_long(len(encoding), max_tokens, field)  # before a list of millions holds the GIL
    ids = encoding.ids
    # The second may be what is added behind an empty text.
    if single_id is not None and ids[:2] == [single_id] * 2 and encoding.token_to_sequence(1) is not None:
        del ids[0]
    if max_tokens is not None and len(ids) > max_tokens:
        raise _too_long(len(ids), max_tokens, field)
    return tuple(ids)


def _too_long(num_ids: int, max_tokens: int, field: str) -> PromptTooLong:
    message = f"the prompt has {num_ids} tokens; the context holds {max_tokens}"
    return PromptTooLong(message, field=field, needed=num_ids, limit=max_tokens)


def _load(definition: str | bytes, special_texts: Any) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition if isinstance(definition, str) else definition.decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"tokenizer.json: cannot be read ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = [text for text in special_texts if tokenizer.token_to_id(text) is not None]
    if known:
        tokenizer.add_special_tokens(known)
    return tokenizer


def respelled(spec: dict[str, Any], sign: str) -> dict[str, Any]:
    """Return `spec`, a tokenizer.json, with `sign` before every special token's text and with the same ids.

    The model loses the old spelling, too, since a Unigram or WordLevel model, or one that takes whole words, could
    match it in text.
    """
    added = [dict(token) for token in spec["added_tokens"]]
    renamed = {token["content"]: sign + token["content"] for token in added if token["special"]}
    for token in added:
        if token["special"]:
            token.update(content=renamed[token["content"]], normalized=False)
    model = dict(spec["model"])
    vocab = model["vocab"]
    model["vocab"] = (
        _vocab_dict(vocab, renamed, added) if isinstance(vocab, dict) else _vocab_list(vocab, renamed, added)
    )
    if isinstance(vocab, dict) and model.get("merges") and any(text in vocab for text in renamed):
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, renamed)]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return {**spec, "added_tokens": added, "model": model}


def _vocab_dict(vocab: dict[str, int], renamed: dict[str, str], added: list[dict[str, Any]]) -> dict[str, int]:
    # Added tokens go into the model's own vocabulary, so that the library cannot renumber them.
    return {renamed.get(text, text): id for text, id in vocab.items()} | {
        token["content"]: token["id"] for token in added
    }


def _vocab_list(vocab: list[list[Any]], renamed: dict[str, str], added: list[dict[str, Any]]) -> list[list[Any]]:
    lowest = min((score for _, score in vocab), default=0.0)
    pieces = [[renamed.get(text, text), score] for text, score in vocab]
    ids = {token["id"]: token["content"] for token in added}
    pad = next(iter(renamed.values()), "\0")
    pieces += [[ids.get(id, f"{pad}{id}"), lowest] for id in range(len(pieces), max(ids, default=-1) + 1)]
    return pieces


def _touches(pair: Any, renamed: dict[str, str]) -> bool:
    left, right = pair if isinstance(pair, list) else pair.split(" ", 1)
    return left in renamed or right in renamed or left + right in renamed
