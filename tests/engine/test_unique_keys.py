"""No object has a key twice, and none is led where it must."""

from __future__ import annotations

import sys
from random import Random

import llguidance
import pytest

from photon_grpc.engine.unique_keys import KeyState, KeyTokens, after

TOKENIZER = llguidance.LLTokenizer("byte", slices=[])


def walked(*tokens: bytes) -> KeyState | None:
    state: KeyState | None = KeyState()
    for token in tokens:
        assert state is not None
        state = after(state, token)
    return state


def allowed(state: KeyState, token_id: int) -> bool:
    mask = bytearray(b"\xff" * 4 * -(-TOKENIZER.vocab_size // 32))
    KeyTokens(TOKENIZER).forbid(state, memoryview(mask))
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


@pytest.mark.parametrize(
    "text",
    [
        r'{"a":1,"b":"a","c":{"a":2},"d":["a","a",{"a":3}],"e":"\"a\":","a\"":4,"\\":5}',
        '[{"a":1},{"a":1}]',
        '"a,"',
        '{"":0," ":0}',
        '{"1":0,"11":0,"-1":0,"0":0}',
    ],
)
def test_keys_that_differ_or_stand_in_other_objects_are_let_through_however_they_are_cut(text: str) -> None:
    random, whole = Random(3), text.encode()
    for _ in range(20):
        cuts = sorted(random.sample(range(len(whole)), min(5, len(whole) - 1)))
        parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert walked(*parts) == KeyState()


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a"', '{"a":{"b":1},"a"', '[{"a":[{}],"a"', r'{"a\"":1,"a\""', '{"x":{"a":1,"b":2,"a"', '{"":1,""'],
)
def test_a_key_that_is_there_is_refused_with_its_last_byte_and_within_a_token(text: str) -> None:
    whole = text.encode()
    for start in range(len(whole)):
        before = walked(whole[:start])
        assert before is not None and after(before, whole[start:]) is None
    state = walked(whole[:-1])
    assert state is not None and not allowed(state, ord('"')) and allowed(state, ord("x"))


def test_an_integer_that_could_only_end_as_one_that_is_there_is_not_begun() -> None:
    state = walked(b'{"0":1,"')
    assert state is not None and not allowed(state, ord("0")) and allowed(state, ord("1"))
    taken = "".join(f'"12345678{digit}":0,' for digit in range(10))
    full = walked(f'{{"12345678":0,{taken}"1234567'.encode())
    assert full is not None and not allowed(full, ord("8")) and allowed(full, ord("9")) and allowed(full, ord('"'))


def test_keys_go_on_until_every_integer_of_a_beginning_is_taken() -> None:
    """Random digits behind 1234567, of nine at most: 1 + 10 + 100 keys, and never a place without a way."""
    random, state, keys = Random(5), walked(b"{"), []
    while True:
        assert state is not None
        begun = after(state, b'"1234567')
        if begun is None:
            break
        state, key = begun, "1234567"
        while True:
            ways = [f"{digit}" for digit in range(10)] if len(key) < 9 else []
            ways = [way for way in (*ways, '":0,') if after(state, way.encode()) is not None]
            assert ways
            way = random.choice(ways)
            state = after(state, way.encode())
            assert state is not None
            if len(way) > 1:
                break
            key += way
        keys.append(key)
    assert len(keys) == len(set(keys)) == 111


def test_tokens_that_were_tried_or_undone_leave_nothing() -> None:
    draw = Random(11)
    pieces = [b'{"', b'"', b'":', b'":0,"', b"1", b"12", b"0", b"-", b"a", b'a":{"', b'0},"', b'":1},"1']
    for _ in range(200):
        tokens, states = [], [KeyState()]
        for _ in range(40):
            for tried in draw.sample(pieces, 3):
                after(states[-1], tried)
            piece = draw.choice(pieces)
            state = after(states[-1], piece) if states[-1].open or piece[:1] == b"{" else None
            if state is None or draw.random() < 0.2:
                num_undone = draw.randrange(len(states))
                del states[len(states) - num_undone :], tokens[len(tokens) - num_undone :]
                continue
            tokens.append(piece)
            states.append(state)
            known = walked(*tokens)
            assert known is not None
            for piece in pieces:
                one, other = after(state, piece), after(known, piece)
                assert (one is None) == (other is None), (tokens, piece)


def test_a_mask_takes_as_many_calls_however_many_keys_there_are() -> None:
    def num_calls(num_keys: int) -> int:
        state = walked(b"{", *(b'"%d":0,' % (100_000 + number) for number in range(num_keys)), b'"1')
        assert state is not None
        tokens, mask = KeyTokens(TOKENIZER), memoryview(bytearray(b"\xff" * 4 * -(-TOKENIZER.vocab_size // 32)))
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            tokens.forbid(state, mask)
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(1_000) <= 1.1 * num_calls(10)
