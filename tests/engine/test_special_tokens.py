"""A grammar's vocabulary, in which text that spells a special token is text."""

from __future__ import annotations

import llguidance
import pytest
from tokenizers import Tokenizer

from photon_grpc.engine.constraints.special_tokens import rename_special_tokens
from tests.frontend.small_tokenizers import TEXT, definition


@pytest.mark.parametrize("kind", ["byte_level", "qwen_like", "llama2_like"])
def test_spelled_special_tokens_are_text_and_other_tokens_are_unchanged(kind: str) -> None:
    tokenizer = Tokenizer.from_str(definition(kind))
    size = tokenizer.get_vocab_size()
    text, special_ids = rename_special_tokens(definition(kind).encode())
    before = llguidance.LLTokenizer(definition(kind), n_vocab=size, eos_token=special_ids[:1])
    after = llguidance.LLTokenizer(text, n_vocab=size, eos_token=special_ids[:1])
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id: added[token_id].content for token_id in added if added[token_id].special}
    assert special_ids == [*special]
    for token_id in range(size):
        assert after.is_special_token(token_id) == before.is_special_token(token_id)
        if token_id not in special:
            assert after.decode_bytes([token_id]) == before.decode_bytes([token_id])
    for token_id, name in special.items():
        assert token_id in before.tokenize_str(f"x{name}y")
        ids = after.tokenize_str(f"x{name}y")
        assert not special.keys() & {*ids} and name.encode() in after.decode_bytes(ids)
    for line in TEXT[:2]:
        assert after.tokenize_str(line) == before.tokenize_str(line)


def test_names_cannot_be_guessed() -> None:
    tokenizer = definition("byte_level").encode()
    assert rename_special_tokens(tokenizer)[0] != rename_special_tokens(tokenizer)[0]


def test_unknown_text_is_unchanged() -> None:
    text, special_ids = rename_special_tokens(definition("metaspace_unigram").encode())
    before, after = Tokenizer.from_str(definition("metaspace_unigram")), Tokenizer.from_str(text)
    assert after.encode("語 fox").ids == before.encode("語 fox").ids
    assert not {*special_ids} & {*after.encode("<s>", add_special_tokens=False).ids}
