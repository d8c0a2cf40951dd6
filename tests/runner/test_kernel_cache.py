"""A damaged cache of kernels is named where a start fails, and the cache of a start that succeeds is not read."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.errors import ConfigError, InternalFailure
from photon_grpc.runner.kernel_cache import damage
from photon_grpc.runner.warm_up import compute


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a kernel as Triton writes it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    directory = tmp_path / "KEY"
    directory.mkdir()
    paths = {name: str(directory / name) for name in ("add.json", "add.cubin", "add.ptx")}
    for path in paths.values():
        Path(path).write_text("{}")
    (directory / "__grp__add.json").write_text(json.dumps({"child_paths": paths}))
    return directory


def test_files_of_a_kernel_that_are_missing_or_empty_are_damage(kernel: Path) -> None:
    assert damage() == ""
    (kernel / "add.cubin").write_text("")
    assert "1 files such as add.cubin" in damage()
    (kernel / "add.cubin").unlink()
    found = damage()
    assert "add.cubin" in found and f"{kernel.parent} is damaged" in found and "delete this directory" in found
    # Triton compiles a kernel without metadata again.
    (kernel / "add.json").unlink()
    assert damage() == ""
    (kernel / "__grp__add.json").write_text("{")
    assert "__grp__add.json" in damage()


def test_a_start_that_fails_names_a_damaged_cache_beside_what_else_it_may_be(kernel: Path) -> None:
    fault = Fault.of(InternalFailure("the step could not be computed"))
    runner = Mock()
    runner.submit.return_value.result.return_value = StepOutput(0, (0,), {0: fault})
    batch = Batch(0, (1,), (1,), (1,))
    with pytest.raises(ConfigError, match="for want of memory") as sound:
        compute(runner, batch)
    (kernel / "add.cubin").unlink()
    with pytest.raises(ConfigError, match=r"cache of kernels in .* is damaged") as raised:
        compute(runner, batch)
    # The step may have failed for another reason than the kernel that is missing.
    assert str(raised.value) == f"{sound.value}; {damage()}" and raised.value.field == sound.value.field
