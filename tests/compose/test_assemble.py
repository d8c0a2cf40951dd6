"""What cannot be put together is said in a sentence about the flag, not in a stack."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from photon_grpc.compose.assemble import assemble
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError, ModelLoadError
from tests.runner.models import model
from tests.runner.served import Served


def test_blocks_that_no_memory_holds_are_refused_by_flag() -> None:
    config = resolve({"num_blocks": str(10**12)}, {}).config
    with pytest.raises(ConfigError, match=f"{10**12} KV blocks of 16 tokens .* --num-blocks"):
        assemble(config, lambda stage, done, total: None)


@pytest.mark.parametrize(("penalty", "is_told"), [(1.1, True), (1.0, False)])
def test_a_default_of_the_model_that_cannot_be_applied_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, penalty: float, is_told: bool
) -> None:
    directory = shutil.copytree(model("llama")[0], tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty}))
    Served(directory)
    assert any("repetition_penalty" in record.getMessage() for record in caplog.records) == is_told


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
