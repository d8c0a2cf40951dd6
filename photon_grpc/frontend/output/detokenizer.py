"""Detokenizers: ids to text, one id at a time. Text is append-only, valid UTF-8 and independent of how ids are grouped.

Most tokenizers give every token a fixed byte string. For them a table and an incremental UTF-8 decoder are exact and
cost well under a microsecond per token. (The library's own DecodeStream withholds text while it ends with U+FFFD, which
invalid bytes make permanent, and decodes two windows for every token.) For other tokenizers, growing windows are
decoded and compared.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Detokenizer(Protocol):
    """The text of one output."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` releases, "" for an unfinished character or an id without a token."""

    def finish(self) -> str:
        """Return the text that is held back; an unfinished character becomes one U+FFFD."""


class Vocabulary(Protocol):
    """The tables that all Detokenizers of a model share."""

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for ids that follow `prompt_ids`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, perhaps part of a character; b"" for an id without a token."""

    @property
    def max_token_bytes(self) -> int:
        """An upper bound of the bytes of a token."""


def make_vocabulary(spec: dict[str, Any], tokenizer: tokenizers.Tokenizer, silent_ids: frozenset[int]) -> Vocabulary:
    """Return the vocabulary for the decoder in tokenizer.json. `silent_ids` release no text."""
    steps = _decoder_steps(spec.get("decoder"))
    kinds = [step["type"] for step in steps]
    tokens = _token_texts(tokenizer)
    if kinds == ["ByteLevel"]:
        return _table(tokens, silent_ids, _byte_level)
    if kinds == ["Metaspace"]:
        sign = steps[0]["replacement"]
        first = None if steps[0].get("prepend_scheme") == "never" else (lambda token: token.replace(sign, "").encode())
        return _table(tokens, silent_ids, lambda token: token.replace(sign, " ").encode(), first=first)
    sentencepiece = _sentencepiece(steps)
    if sentencepiece is not None:
        return _table(tokens, silent_ids, sentencepiece[0], num_stripped=sentencepiece[1])
    return WindowVocabulary(tokenizer, silent_ids)


class TableVocabulary:
    """A vocabulary whose tokens have fixed bytes."""

    def __init__(
        self, texts: list[str | None], raw: dict[int, bytes], first_texts: list[str | None] | None, num_stripped: int
    ) -> None:
        #: By id; None if the bytes are not whole characters and stand in `raw`.
        self.texts = texts
        self.raw = raw
        #: The texts of tokens at the very beginning, if they differ there.
        self.first_texts = first_texts
        #: The most spaces that are removed at the very beginning.
        self.num_stripped = num_stripped

    def token_bytes(self, token_id: int) -> bytes:
        try:
            text = self.texts[token_id]
        except IndexError:
            return b""
        return self.raw[token_id] if text is None else text.encode()

    @cached_property
    def max_token_bytes(self) -> int:
        whole = max((len(text.encode()) for text in self.texts if text), default=0)
        return max(whole, max(map(len, self.raw.values()), default=0))

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        if self.first_texts is None and not self.num_stripped:
            return TableDetokenizer(self)
        size = len(self.texts)
        follows = any(id < size and self.texts[id] != "" for id in prompt_ids)
        return TableDetokenizer(self) if follows else BeginningDetokenizer(self)


class TableDetokenizer:
    """A detokenizer that looks bytes up and holds back those of an unfinished character."""

    __slots__ = ("_texts", "_unfinished", "_vocabulary")

    def __init__(self, vocabulary: TableVocabulary) -> None:
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._unfinished = b""

    def push(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is not None and not self._unfinished:
            return text
        data = self._unfinished + (self._vocabulary.raw[token_id] if text is None else text.encode())
        text, num_read = utf_8_decode(data, "replace", False)
        self._unfinished = data[num_read:]
        if self._unfinished[:1] == b"\xed" and self._unfinished[1:] >= b"\xa0":
            # Half a surrogate, which nothing can complete to a character, although Python waits for more.
            text += _REPLACEMENT * len(self._unfinished)
            self._unfinished = b""
        return text

    def finish(self) -> str:
        text = _REPLACEMENT if self._unfinished else ""
        self._unfinished = b""
        return text


class BeginningDetokenizer(TableDetokenizer):
    """A detokenizer that starts at the very beginning and removes the space that the tokenizer put there."""

    __slots__ = ("_is_first", "_num_stripped")

    def __init__(self, vocabulary: TableVocabulary) -> None:
        super().__init__(vocabulary)
        self._num_stripped = vocabulary.num_stripped
        self._is_first = vocabulary.first_texts is not None

    def push(self, token_id: int) -> str:
        first_texts = self._vocabulary.first_texts
        if self._is_first and first_texts is not None and token_id < len(first_texts) and self._texts[token_id] != "":
            self._is_first = False
            return first_texts[token_id] or ""
        text = super().push(token_id)
        while self._num_stripped and text:
            is_space = text[0] == " "
            self._num_stripped = self._num_stripped - 1 if is_space else 0
            text = text[1:] if is_space else text
        return text


class WindowVocabulary:
    """A vocabulary with any other decoder; the library decodes."""

    #: Ids of context at the start of a window.
    CONTEXT = 8

    def __init__(self, tokenizer: tokenizers.Tokenizer, silent_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._silent_ids or self._tokenizer.id_to_token(token_id) is None

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_silent(token_id) else self.decode([token_id]).encode()

    @cached_property
    def max_token_bytes(self) -> int:
        # A quick upper bound: a byte may become U+FFFD, and a space may precede it.
        longest = max((len(text.encode()) for text in self._tokenizer.get_vocab(with_added_tokens=True)), default=0)
        return 3 * longest + 1

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        loud = [id for id in prompt_ids[-4 * self.CONTEXT :] if not self.is_silent(id)]
        return WindowDetokenizer(self, loud[-self.CONTEXT :])


class WindowDetokenizer:
    """A detokenizer that decodes a window with and without its new ids; the difference is the new text."""

    #: The most ids whose text is withheld because it ends with U+FFFD: a character has four bytes.
    MAX_WITHHELD = 4

    def __init__(self, vocabulary: WindowVocabulary, context: list[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = context
        self._shown = vocabulary.decode(context)
        self._num_withheld = 0

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        self._num_withheld += 1
        text = self._vocabulary.decode(self._ids)
        if text.endswith(_REPLACEMENT) and self._num_withheld < self.MAX_WITHHELD:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._vocabulary.decode(self._ids))

    def _release(self, text: str) -> str:
        new = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._num_withheld = 0
        if len(self._ids) >= 2 * self._vocabulary.CONTEXT:
            self._ids = self._ids[-self._vocabulary.CONTEXT :]
            text = self._vocabulary.decode(self._ids)
        elif len(text) < len(self._shown):
            text = self._shown
        self._shown = text
        return new


def _table(
    tokens: list[str | None],
    silent_ids: frozenset[int],
    to_bytes: Callable[[str], bytes],
    first: Callable[[str], bytes] | None = None,
    num_stripped: int = 0,
) -> TableVocabulary:
    raw: dict[int, bytes] = {}
    texts: list[str | None] = []
    for id, token in enumerate(tokens):
        data = b"" if token is None or id in silent_ids else to_bytes(token)
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            texts.append(None)
            raw[id] = data
    if first is None:
        return TableVocabulary(texts, raw, None, num_stripped)
    return TableVocabulary(
        texts, raw, [None if token is None else first(token).decode() for token in tokens], num_stripped
    )


def _token_texts(tokenizer: tokenizers.Tokenizer) -> list[str | None]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, id in vocab.items():
        tokens[id] = text
    return tokens


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoder_steps(part)]


def _sentencepiece(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], int] | None:
    """Return (token to bytes, spaces stripped at the beginning) if steps are Replace*, ByteFallback, Fuse, Strip?.

    A run of byte tokens that is not UTF-8 becomes U+FFFD for each maximal part, as in a byte-level tokenizer. The
    library waits for the run's end and turns even its valid characters into U+FFFD, which a stream has sent by then.
    """
    replacements = []
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in rest]
    if kinds not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    strip: dict[str, Any] = rest[2] if len(rest) == 3 else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"]:
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.match(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return to_bytes, int(strip["start"])


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token: those of the byte-level alphabet, or UTF-8 if it has other characters."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are their own character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
