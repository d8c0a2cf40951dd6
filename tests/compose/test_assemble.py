"""What cannot be put together is said in a sentence about the flag, not in a stack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from photon_grpc.bridge.heartbeat import NoHeartbeat
from photon_grpc.compose.assemble import assemble
from photon_grpc.compose.engine_facts import _triton
from photon_grpc.config.flags import CacheConfig, ServeConfig
from photon_grpc.config.resolve import resolve
from photon_grpc.config.settings import settings
from photon_grpc.core.frames import Add, StepFrame
from photon_grpc.core.ports import EnginePorts
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.errors import ConfigError, ModelLoadError
from tests.engine.fakes import FakeBridge
from tests.runner.models import model
from tests.runner.served import Served


def test_blocks_that_no_memory_holds_are_refused_by_flag() -> None:
    config = ServeConfig(cache=CacheConfig(num_blocks=10**12))
    with pytest.raises(ConfigError, match=f"{10**12} KV blocks of 16 tokens .* --num-blocks"):
        assemble(config, lambda stage, done, total: None)


@pytest.mark.parametrize(("num_fused", "told"), [(0, "triton"), (12, "triton, fused 12 of 26"), (26, "triton, fused")])
def test_layers_that_are_not_fused_are_told(num_fused: int, told: str) -> None:
    assert _triton(num_fused, 26) == told


SIZES = [
    (setting.name, bound)
    for setting in settings()
    if setting.kind is int and setting.section in ("model", "cache", "scheduler")
    for bound in (setting.bounds.at_least, setting.bounds.at_most)
]


@pytest.mark.parametrize(("name", "value"), SIZES)
def test_every_size_that_is_taken_starts_and_serves_or_is_refused_in_one_line(name: str, value: float) -> None:
    config = resolve({name: str(int(value))}, {}).config
    try:
        assembled = assemble(config, lambda stage, done, total: None)
    except ConfigError as error:
        assert error.field == name and "\n" not in str(error)
        return
    post = FakeBridge()
    engine = assembled.engine(EnginePorts(post, post, NoHeartbeat()))
    prompt = (1,) if name == "max_model_len" else tuple(range(1, 40))
    engine._broadcaster._interval_s = 0.0
    post.put(Add(1, Request("r", prompt, SamplingParams(0.0), StopParams(1), 0.0)))
    with pytest.raises(EOFError):
        for _ in range(200):
            engine.step()
    ends = [frame for _, frame in post.sent if isinstance(frame, StepFrame) and (frame.finished or frame.failed)]
    (end,) = ends
    assert len(end.ids) == 1 or end.failed[0].fault.reason == "KV_CAPACITY"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_no_numbers_are_told_before_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, number: float
) -> None:
    directory = shutil.copytree(model("llama")[0], tmp_path / "poisoned")
    weights = load_file(directory / "model.safetensors")
    weights[name].fill_(number)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"poisoned: .*NaN or infinite logits.*weights") as caught:
        Served(directory)
    assert "log" not in str(caught.value).replace("logits", "")
    assert caplog.messages == []
