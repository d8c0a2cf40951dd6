"""Which engines import Triton: those that may launch its kernels."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from photon_grpc.compose.triton_import import skip_triton
from photon_grpc.config.flags import DeviceConfig


@pytest.mark.parametrize(
    ("device", "kernels", "has_cuda", "interpreted", "imports"),
    [
        ("auto", "auto", False, False, False),
        ("cpu", "auto", True, False, False),
        ("cpu", "torch", False, False, False),
        ("auto", "auto", True, False, True),
        ("cuda", "torch", True, False, True),
        ("cpu", "triton", False, False, True),
        ("cpu", "auto", False, True, True),
    ],
)
def test_an_engine_on_a_cpu_takes_triton_for_missing(
    device: str, kernels: str, has_cuda: bool, interpreted: bool, imports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test of this process may have imported it.
    for name in [each for each in sys.modules if each.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    skip_triton(DeviceConfig(device=device, kernels=kernels))
    assert ("triton" not in sys.modules) == imports
    # As with a package that is missing, not an error.
    assert imports or importlib.util.find_spec("triton") is None


def test_an_engine_that_a_flag_places_on_a_cpu_asks_torch_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # An import of it fails.
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.delitem(sys.modules, "triton")
    skip_triton(DeviceConfig(device="cpu", kernels="auto"))
    assert sys.modules["triton"] is None
