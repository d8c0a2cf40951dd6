"""Released text against the tokenizers library decoding everything at once."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from photon_grpc.frontend.input.tokenizer import Tokenizer
from tests.examples import examples
from tests.frontend.small_tokenizers import TEXT, definition

EXACT = ("byte_level", "qwen_like", "metaspace_unigram", "wordpiece")


@lru_cache
def pair(kind: str) -> tuple[Tokenizer, Reference]:
    return Tokenizer(definition(kind)), Reference.from_str(definition(kind))


def released(kind: str, ids: list[int], skip: bool, prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = pair(kind)[0].detokenizer(skip_special_tokens=skip, prompt_ids=prompt)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_what_the_library_decodes(kind: str, data: st.DataObject, skip: bool) -> None:
    size = pair(kind)[1].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=60))
    pieces = released(kind, ids, skip)
    for piece in pieces:
        piece.encode()
    assert "".join(pieces) == pair(kind)[1].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "qwen_like", "llama2_like"])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_become_what_python_decodes(kind: str, data: bytes) -> None:
    """Decode one id per byte.

    Characters come whole, invalid bytes become U+FFFD at once, and an unfinished end becomes one U+FFFD.
    """
    reference = pair(kind)[1]
    if kind == "llama2_like":
        ids = [reference.token_to_id(f"<0x{byte:02X}>") for byte in data]
        prompt = (reference.token_to_id("▁the") or reference.token_to_id("▁"),)
    else:
        chars = {
            byte: reference.encode(bytes([byte]).decode("latin-1"), add_special_tokens=False).tokens
            for byte in range(128)
        }
        alphabet = {**{byte: tokens[0] for byte, tokens in chars.items()}, **_byte_alphabet()}
        ids = [reference.token_to_id(alphabet[byte]) for byte in data]
        prompt = ()
    pieces = released(kind, ids, True, prompt)
    assert "".join(pieces) == data.decode(errors="replace")
    for n in range(len(data) + 1):
        held = data[:n].decode(errors="replace")
        assert held.startswith("".join(pieces[:n]))
        assert len(held) - len("".join(pieces[:n])) <= 1


@pytest.mark.parametrize("kind", ["llama2_like", "metaspace_unigram", "wordpiece", "byte_level"])
def test_text_after_a_prompt_keeps_its_space(kind: str) -> None:
    ours, reference = pair(kind)
    prompt = ours.encode("The quick brown fox", add_special_tokens=False)
    for text in TEXT:
        ids = list(ours.encode("The quick brown fox " + text, add_special_tokens=False))[len(prompt) :]
        whole = reference.decode([*prompt, *ids])
        before = reference.decode(list(prompt))
        assert whole.startswith(before)
        assert "".join(released(kind, ids, True, prompt)) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["llama2_like", "metaspace_unigram"])
def test_text_at_the_very_beginning_loses_its_space(kind: str) -> None:
    ours, reference = pair(kind)
    ids = list(ours.encode("the time is", add_special_tokens=False))
    assert "".join(released(kind, ids, True)) == reference.decode(ids) == "the time is"
    assert "".join(released(kind, ids, True, prompt=(1,))) == "the time is", "a silent BOS changes nothing"


def test_real_text_survives_the_round_trip() -> None:
    generator = random.Random(0)
    for kind in ("byte_level", "qwen_like", "llama2_like"):
        ours = pair(kind)[0]
        for _ in range(50):
            text = "".join(generator.choice(["a", " ", "é", "日", "🙂", "\n", "def", "<", "ß"]) for _ in range(40))
            ids = ours.encode(text, add_special_tokens=False)
            assert ours.decode(ids) == text


def _byte_alphabet() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return dict(bytes_to_unicode())
