"""Ids that become text together, against the same ids one after another and against what the library decodes."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.output import Ending, OutputText
from tests.examples import examples
from tests.frontend.small_tokenizers import KINDS, definition


@lru_cache
def pair(kind: str) -> tuple[Tokenizer, Reference]:
    return Tokenizer(definition(kind)), Reference.from_str(definition(kind))


def groups(draw: st.DrawFn, kind: str) -> list[list[int]]:
    size = pair(kind)[1].get_vocab_size()
    return draw(st.lists(st.lists(st.integers(0, size + 3), max_size=8), max_size=12))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), skip=st.booleans(), has_prompt=st.booleans())
def test_ids_together_release_what_they_release_one_by_one(
    kind: str, data: st.DataObject, skip: bool, has_prompt: bool
) -> None:
    prompt = pair(kind)[0].encode("the", add_special_tokens=False) if has_prompt else ()
    together, single = [pair(kind)[0].detokenizer(skip_special_tokens=skip, prompt_ids=prompt) for _ in range(2)]
    for group in data.draw(st.composite(groups)(kind)):
        assert together.push_all(group) == "".join([single.push(each) for each in group])
    assert together.finish() == single.finish()


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), min_tokens=st.integers(0, 6), is_shown=st.booleans(), ends=st.booleans())
def test_a_message_has_the_text_of_its_ids_however_they_are_grouped(
    data: st.DataObject, min_tokens: int, is_shown: bool, ends: bool
) -> None:
    """A token that should end the output releases its text only with the next id or the end."""
    ending = Ending(frozenset({40, 41}), min_tokens, is_shown)
    ids, reference = data.draw(st.lists(st.integers(30, 300), min_size=1, max_size=40)), pair("byte_level")[1]
    output = OutputText(0, detokenizer=pair("byte_level")[0].detokenizer(), wants_ids=True, ending=ending)
    text, taken = "", list[int]()
    for count, each in enumerate(ids, 1):
        assert not output.push(each)
        if data.draw(st.booleans()):
            assert output.has_news()
            delta = output.take()
            text, taken = text + delta.text, [*taken, *delta.token_ids]
            is_held = each in ending.token_ids and count > min_tokens
            decoded = reference.decode(taken[: len(taken) - is_held])
            assert taken == ids[:count] and decoded.rstrip("\N{REPLACEMENT CHARACTER}").startswith(
                text.rstrip("\N{REPLACEMENT CHARACTER}")
            )
            assert len(decoded) - len(text) <= 1, "no more than an unfinished character is held back"
    is_ended = ends and ids[-1] in ending.token_ids and len(ids) > min_tokens
    output.end(FinishReason.EOS if is_ended else FinishReason.MAX_TOKENS)
    text += output.take().text
    assert text == reference.decode(ids[:-1] if is_ended and not is_shown else ids)


def test_waiting_ids_of_an_unread_output_become_text_in_slices() -> None:
    """So that reading an answer of a hundred thousand tokens does not hold up other streams."""
    sizes: list[int] = []

    class Counted:
        def push_all(self, token_ids: list[int]) -> str:
            sizes.append(len(token_ids))
            return "x" * len(token_ids)

        def finish(self) -> str:
            return ""

    output = OutputText(0, detokenizer=Counted())  # type: ignore[arg-type]
    for _ in range(1000):
        output.push(7)
    assert output.take().text == "x" * 1000
    assert max(sizes) <= 64 and len(sizes) < 20
