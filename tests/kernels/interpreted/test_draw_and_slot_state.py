"""Drawing and the slot table's kernels in the interpreter: equal to their torch references."""

from __future__ import annotations

import torch

from photon_grpc.kernels import slot_state
from photon_grpc.kernels.sampling import draw


def rows() -> draw.SamplingMetadata:
    """Five rows at slots in another order."""
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5, 1e-6])
    number = torch.arange(5)
    slots, lengths = torch.tensor([0, 3, 2, 1, 4]), (number * 9).int()
    return draw.SamplingMetadata(slots, lengths, temperature, number - 2, number % 2, number * 2)


def test_drawn_ids_are_equal() -> None:
    torch.manual_seed(0)
    for columns in (50, 2048, 5000):
        logits = torch.randn(5, columns) * 3
        assert torch.equal(draw.launch(logits, rows()), draw.reference(logits, rows()))


def test_ties_are_the_lowest_id_and_rows_without_finite_logits_are_invalid() -> None:
    logits = torch.zeros(5, 4100)
    logits[1, 4099] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = -float("inf")
    logits[4, [3, 4000]] = 5.0
    expected = draw.reference(logits, rows())
    assert expected.tolist() == [0, -1, -1, -1, 3]
    assert torch.equal(draw.launch(logits, rows()), expected)


def test_a_slot_s_inputs_and_its_advance_are_equal() -> None:
    torch.manual_seed(1)
    slots = torch.tensor([3, 1, 0, 6, 0])
    state = torch.randint(0, 90, (7, 40), dtype=torch.int32), torch.tensor([0, 5, 9, 17, 2, 3, 30])
    table = torch.randint(1, 50, (7, 10), dtype=torch.int32)
    mine = slot_state.decode_inputs(slots, *state, table, 4)
    theirs = slot_state.decode_inputs_reference(slots, *state, table, 4)
    for a, b in zip(mine[:4], theirs[:4], strict=True):
        assert torch.equal(a, b)
    for row, position in enumerate(mine[1].tolist()):
        assert torch.equal(mine[4][row, : position // 4 + 1], theirs[4][row, : position // 4 + 1])
    ids = torch.tensor([11, -1, 13, 14, 15])
    copies = [[tensor.clone() for tensor in state] for _ in range(2)]
    slot_state.advance(slots, ids, *copies[0])
    slot_state.advance_reference(slots, ids, *copies[1])
    assert torch.equal(copies[0][0][1:], copies[1][0][1:]) and torch.equal(copies[0][1], copies[1][1])
    assert copies[0][1].tolist() == [0, 6, 9, 18, 2, 3, 31]


def test_a_mixed_step_s_inputs_and_its_advance_are_equal() -> None:
    torch.manual_seed(2)
    slots, counts = torch.tensor([3, 1, 0, 6, 5, 0]), torch.tensor([5, 1, 0, 150, 0, 0])
    state = torch.randint(0, 90, (7, 300), dtype=torch.int32), torch.tensor([0, 5, 9, 17, 2, 3, 30])
    table = torch.randint(1, 50, (7, 75), dtype=torch.int32)
    mine = slot_state.mixed_inputs(slots, counts, 320, *state, table, 4)
    theirs = slot_state.mixed_inputs_reference(slots, counts, 320, *state, table, 4)
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.dtype == b.dtype and (place == 4 or torch.equal(a, b)), place
    for row, length in enumerate(mine[3].tolist()):
        pages = -(-length // 4)
        assert torch.equal(mine[4][row, :pages], theirs[4][row, :pages])
    ids, yields = torch.tensor([11, -1, 13, 14, 15, 16]), torch.tensor([1, 1, 0, 0, 1, 0])
    copies = [[tensor.clone() for tensor in state] for _ in range(2)]
    slot_state.advance_mixed(slots, counts, yields, ids, *copies[0])
    slot_state.advance_mixed_reference(slots, counts, yields, ids, *copies[1])
    assert torch.equal(copies[0][0][1:], copies[1][0][1:]) and torch.equal(copies[0][1], copies[1][1])
    assert copies[0][1].tolist() == [0, 6, 9, 22, 2, 3, 180]
    assert copies[0][0][3, 22] == 11 and copies[0][0][1, 6] == 0 and copies[0][0][6, 180] == state[0][6, 180]
