"""The matrix library is kept from splitting K, and a CPU has none that does."""

from __future__ import annotations

import os

import pytest
import torch

from photon_grpc.runner import library


def test_the_library_loses_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    library.forbid_split_k()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


def test_a_cpu_has_no_split_k() -> None:
    assert not library.splits_k(torch.device("cpu"))
