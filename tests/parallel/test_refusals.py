"""What is refused before a rank is started, by name and with both numbers; what doctor says of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from photon_grpc.cli.doctor import _peers
from photon_grpc.compose.assemble import check_parallel
from photon_grpc.config.flags import ParallelConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.errors import ConfigError, ModelLoadError, StartupError
from photon_grpc.kernels import select
from photon_grpc.layers.parallel.group import LoneRank, MeshSizes, mesh_of
from photon_grpc.layers.parallel.processes import ProcessMesh
from photon_grpc.models import build
from tests.models import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_parallel(ParallelConfig(tensor_parallel_size=2), CPU)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs as many GPUs, there are 1") as caught:
        check_parallel(ParallelConfig(tensor_parallel_size=2), CUDA)
    assert (caught.value.needed, caught.value.limit) == (2, 1)


def test_ranks_of_several_ways_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = "--expert-parallel-size 2 and --pipeline-parallel-size 2 need 4 GPUs, there are 2"
    with pytest.raises(ConfigError, match=said):
        check_parallel(ParallelConfig(expert_parallel_size=2, pipeline_parallel_size=2), CUDA)


@pytest.mark.parametrize(
    ("variant", "sizes", "said"),
    [
        ("qwen3", MeshSizes(experts=2), "--expert-parallel-size: this model has no experts"),
        ("qwen3moe-between", MeshSizes(experts=4), r"num_experts 6 cannot be shared out over 4 ranks \(--expert-"),
        ("deepseek2", MeshSizes(16), "num_heads 4 cannot be shared out over 16 ranks"),
        ("qwen3", MeshSizes(stages=4), r"num_hidden_layers 3 cannot be shared out over 4 stages \(--pipeline-"),
        ("qwen3-window", MeshSizes(stages=2), "layers with different sliding windows cannot be shared out over stages"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(
    variant: str, sizes: MeshSizes, said: str, tmp_path: Path
) -> None:
    config = read_model_dir(reference.save(reference.make_model(variant), tmp_path))
    with pytest.raises(ModelLoadError, match=said):
        build(
            config, dtype=torch.float32, device="cpu", kernels=select("torch", "cpu"), max_model_len=64,
            mesh=mesh_of(0, sizes, LoneRank),
        )  # fmt: skip


def test_a_process_has_one_mesh_at_a_time() -> None:
    first = ProcessMesh(0, MeshSizes(2), -1)
    with pytest.raises(StartupError, match="another model of this program is computed by several ranks"):
        ProcessMesh.refuse_another()
    with pytest.raises(StartupError, match="close it first"):
        # Of another thread that was not refused before.
        ProcessMesh(0, MeshSizes(2), -1)
    first.leave()
    ProcessMesh.refuse_another()
    second = ProcessMesh(0, MeshSizes(2), -1)
    first.leave()
    with pytest.raises(StartupError):
        ProcessMesh.refuse_another()
    del second
    # One that nobody has any more, as of a program that was not closed.
    ProcessMesh.refuse_another()


def test_doctor_names_gpus_that_do_not_reach_each_other() -> None:
    assert _peers([]) == "all GPUs reach each other directly"
    assert _peers([[1, 0]]).endswith("cuda:0 and cuda:1")
