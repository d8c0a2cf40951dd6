"""What is refused before a rank is started, by name and with both numbers; what doctor says of GPUs."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.cli.doctor import _peers
from photon_grpc.compose.assemble import check_parallel
from photon_grpc.config.flags import ParallelConfig
from photon_grpc.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_parallel(ParallelConfig(tensor_parallel_size=2), CPU)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs as many GPUs, there are 1") as caught:
        check_parallel(ParallelConfig(tensor_parallel_size=2), CUDA)
    assert (caught.value.needed, caught.value.limit) == (2, 1)


@pytest.mark.parametrize("name", ["expert_parallel_size", "pipeline_parallel_size"])
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} 2 is not supported yet"):
        check_parallel(ParallelConfig(**{name: 2}), CPU)


def test_doctor_names_gpus_that_do_not_reach_each_other() -> None:
    assert _peers([]) == "all GPUs reach each other directly"
    assert _peers([[1, 0]]).endswith("cuda:0 and cuda:1")
