"""The numerics version changes with each of its parts and with nothing else."""

from __future__ import annotations

import re

import pytest
import torch
from msgspec.structs import fields, replace

from photon_grpc.core.numerics import Numerics
from photon_grpc.kernels import TORCH
from photon_grpc.runner.numerics import numerics

CPU = torch.device("cpu")


def test_equal_settings_have_an_equal_short_version() -> None:
    one, other = (numerics("strict", TORCH, CPU, torch.float32) for _ in range(2))
    assert one == other and re.fullmatch("[0-9a-f]{16}", one.version)


@pytest.mark.parametrize("name", [field.name for field in fields(Numerics) if field.name != "version"])
def test_the_version_changes_with_every_part(name: str) -> None:
    now = numerics("strict", TORCH, CPU, torch.float32)
    value = getattr(now, name)
    another = {int: lambda: value + 1, str: lambda: value + "x", tuple: lambda: (*value, "x")}[type(value)]()
    assert replace(now, **{name: another}).signed().version != now.version


def test_the_version_is_of_the_parts_alone() -> None:
    now = numerics("strict", TORCH, CPU, torch.float32)
    assert replace(now, version="another").signed() == now


def test_fast_is_seen_in_the_version() -> None:
    strict, fast = (numerics(mode, TORCH, CPU, torch.float32) for mode in ("strict", "fast"))
    assert re.fullmatch("fast-[0-9a-f]{16}", fast.version)
    assert fast.version.removeprefix("fast-") != strict.version


def test_a_cpu_is_described_by_what_divides_its_sums() -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(numerics("strict", TORCH, CPU, torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert one.device.replace("1 threads", "2 threads") == two.device and one.version != two.version
    assert torch.backends.cpu.get_cpu_capability() in one.device
    assert (one.dtype, one.weights, one.activations, one.kv_cache) == ("bfloat16",) * 4
    assert f"torch {torch.__version__}" in one.libraries and len(one.libraries) > 1


def test_blocks_that_fewer_kernels_read_are_part_of_the_version_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photon_grpc.runner.numerics._gpu", lambda device: "a GPU")

    def version(device: str, block_size: int) -> str:
        made = numerics("strict", TORCH, torch.device(device), torch.bfloat16, block_size=block_size)
        return made.version

    assert len({version("cuda", size) for size in (8, 16, 64, 1024)}) == 1
    assert len({version("cuda", size) for size in (4, 16, 24, 40)}) == 4
    assert version("cpu", 24) == version("cpu", 16)
