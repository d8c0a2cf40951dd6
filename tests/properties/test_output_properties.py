"""A whole output (detokenizer, stop strings, end tokens, min_tokens) against a search over what the library decodes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.output import Ending, OutputText
from photon_grpc.frontend.output.stop_strings import StopMatcher, StopStrings
from tests.examples import examples
from tests.frontend.small_tokenizers import definition

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@lru_cache
def pair() -> tuple[Tokenizer, Reference]:
    return Tokenizer(definition("byte_level")), Reference.from_str(definition("byte_level"))


def settled(ids: list[int], skip: bool) -> str:
    """Return the text of `ids` that is certain whatever follows, without a character that may be incomplete."""
    text = pair()[1].decode(ids, skip_special_tokens=skip)
    if not text.endswith(REPLACEMENT):
        return text
    # Unfinished, if some bytes that can continue a character make it one.
    for num_bytes in (1, 2, 3):
        for more in product((0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF), repeat=num_bytes):
            follow = pair()[1].decode([*ids, *map(_byte_id, more)], skip_special_tokens=skip)
            if not follow.startswith(text):
                return text[:-1]
    return text


def expected(ids: list[int], stops: list[str], min_tokens: int, skip: bool) -> tuple[str, str | None, int]:
    for n in range(1, len(ids) + 1):
        before, text = settled(ids[: n - 1], skip), settled(ids[:n], skip)
        for end in range(len(before) + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and n >= min_tokens:
                stop = max(found, key=len)
                return text[: end - len(stop)], stop, n
    return pair()[1].decode(ids, skip_special_tokens=skip), None, len(ids)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), skip=st.booleans(), min_tokens=st.integers(0, 6))
def test_text_stop_and_count(data: st.DataObject, skip: bool, min_tokens: int) -> None:
    ids = data.draw(st.lists(st.integers(0, pair()[1].get_vocab_size() - 1), min_size=1, max_size=20))
    whole = pair()[1].decode(ids, skip_special_tokens=skip) or "x"
    cut = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 4)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(st.one_of(cut, st.text("ab ", min_size=1, max_size=3)), min_size=1, max_size=3))
    output = OutputText(
        0,
        detokenizer=pair()[0].detokenizer(skip_special_tokens=skip),
        matcher=StopMatcher(StopStrings(tuple(stops))),
        ending=Ending(min_tokens=min_tokens),
    )
    text = ""
    for token_id in ids:
        is_over = output.push(token_id)
        text += output.take().text
        if is_over:
            break
    if output.finish is None:
        output.end(FinishReason.MAX_TOKENS)
        text += output.take().text
    assert output.finish is not None
    assert (text, output.finish.stop_string, output.num_tokens) == expected(ids, stops, min_tokens, skip)


@lru_cache
def _byte_id(byte: int) -> int:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    token_id = pair()[1].token_to_id(bytes_to_unicode()[byte])
    assert token_id is not None
    return int(token_id)
