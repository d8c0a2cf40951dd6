"""The slot table's kernels compiled ahead of time for sm_90 with what their launchers give them: no spills, fits.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels import admit, slot_state
from photon_grpc.kernels.admit import SlotColumns, SlotRow
from photon_grpc.kernels.slot_state import SlotState
from tests.kernels.test_compile import Compiled, check, compiled

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}
NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 9, 4096, 64
each_number_of_groups = pytest.mark.parametrize("num_groups", [1, 3])


class Recorder:
    """A kernel that only keeps its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.grid: tuple[int, ...] = ()
        self.types: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*arguments: Any, **constants: Any) -> None:
            self.grid = grid
            self.constants = {name: value for name, value in constants.items() if name != "launch_pdl"}
            self.types = dict(zip(self.kernel.arg_names, map(type_of, arguments), strict=False))

        return record

    def compiled(self) -> Compiled:
        return compiled(self.kernel, self.types, self.constants)


def type_of(value: Any) -> Any:
    """Return the type of an argument as the compiler needs it."""
    if isinstance(value, tuple):
        return type(value)(*map(type_of, value))
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return None if value is None else "i32"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Make the launchers record their kernels, as on a device with dependent launch."""
    monkeypatch.setattr(slot_state, "launches", lambda _: True)
    monkeypatch.setattr(slot_state, "dependent_launch", lambda _: {"PDL": True, "launch_pdl": True})
    found = {
        name: Recorder(getattr(slot_state, f"{name}_kernel")) for name in ("decode_inputs", "mixed_inputs", "advance")
    }
    for name, recorder in found.items():
        monkeypatch.setattr(slot_state, f"{name}_kernel", recorder)
    return found


def state_of(num_groups: int) -> SlotState:
    return SlotState(
        torch.zeros(NUM_SLOTS, MAX_LEN, dtype=torch.int32),
        torch.zeros(NUM_SLOTS, dtype=torch.int64),
        torch.zeros(NUM_SLOTS, num_groups, MAX_LEN // BLOCK_SIZE, dtype=torch.int32),
    )


def of_rows(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (slots or counts, context_len)."""
    return torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)


@each_number_of_groups
def test_inputs_of_a_decode_step(num_groups: int, launched: dict[str, Recorder]) -> None:
    slots, context_len = of_rows(7)
    slot_state.decode_inputs(slots, context_len, state_of(num_groups), BLOCK_SIZE)
    kernel = launched["decode_inputs"]
    assert kernel.grid == (7, num_groups)
    check(kernel.compiled(), "st.global.b64")


@pytest.mark.parametrize("rows", [1, 7, 512])
@each_number_of_groups
def test_inputs_of_a_mixed_step(num_groups: int, rows: int, launched: dict[str, Recorder]) -> None:
    slots, context_len = of_rows(rows)
    slot_state.mixed_inputs(slots, slots, context_len, 2048, state_of(num_groups), BLOCK_SIZE)
    kernel = launched["mixed_inputs"]
    # One more for the tokens behind the last row's.
    assert kernel.grid == (rows + 1, num_groups)
    check(kernel.compiled(), "st.global.b64")


@each_number_of_groups
def test_advance(num_groups: int, launched: dict[str, Recorder]) -> None:
    slots, _ = of_rows(7)
    slot_state.advance(slots, slots, slots, slots, state_of(num_groups))
    assert launched["advance"].grid == (7,)
    built = launched["advance"].compiled()
    check(built, "st.global.b64")
    assert built.ptx.index("griddepcontrol.wait") < built.ptx.index("ld.global")


@each_number_of_groups
def test_admissions(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(admit.admit_kernel)
    monkeypatch.setattr(admit, "launches", lambda _: True)
    monkeypatch.setattr(admit, "admit_kernel", recorder)
    state = state_of(num_groups)
    columns = SlotColumns(
        state.token_ids, state.block_table, torch.zeros(13, NUM_SLOTS, dtype=torch.int64), torch.zeros(6, NUM_SLOTS)
    )
    blocks = [(1,) * 33] * num_groups
    admit.launch([SlotRow(slot, (5,) * 2049, blocks, (0,) * 13, (0.0,) * 6) for slot in (1, 2)], columns)
    assert recorder.grid == (2, 3)
    check(recorder.compiled(), "st.global.b64")
