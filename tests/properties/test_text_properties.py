"""The text of an output's messages against what the library decodes, however its ids are grouped into messages."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.output import Ending, OutputText
from tests.examples import examples
from tests.frontend.small_tokenizers import definition

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ENDS = frozenset({40, 41})


@lru_cache
def pair() -> tuple[Tokenizer, Reference]:
    return Tokenizer(definition("byte_level")), Reference.from_str(definition("byte_level"))


@settings(max_examples=examples(150), deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(30, 300), st.sampled_from(sorted(ENDS))), min_size=1, max_size=40),
    taken_after=st.sets(st.integers(1, 40)),
    min_tokens=st.integers(0, 6),
    is_shown=st.booleans(),
)
def test_a_message_has_its_ids_and_the_text_that_they_release(
    ids: list[int], taken_after: set[int], min_tokens: int, is_shown: bool
) -> None:
    """A token that should end the output releases its text with the next id or at the end."""
    output = OutputText(
        0, detokenizer=pair()[0].detokenizer(), wants_ids=True, ending=Ending(ENDS, min_tokens, is_shown)
    )
    text, taken = "", list[int]()
    for count, each in enumerate(ids, 1):
        assert not output.push(each)
        if count in taken_after:
            assert output.has_new_text()
            delta = output.take()
            text, taken = text + delta.text, [*taken, *delta.token_ids]
            assert taken == ids[:count]
            is_held = each in ENDS and count > min_tokens
            decoded = pair()[1].decode(ids[: count - is_held])
            # No more than an unfinished character is held back.
            assert text in (decoded, decoded.removesuffix(REPLACEMENT))
    is_ended = ids[-1] in ENDS and len(ids) > min_tokens
    output.end(FinishReason.EOS if is_ended else FinishReason.MAX_TOKENS)
    text += output.take().text
    assert text == pair()[1].decode(ids[:-1] if is_ended and not is_shown else ids)
