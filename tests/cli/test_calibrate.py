"""`calibrate` writes the scales that the largest keys and values of transformers ask for, and `serve` finds them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, DynamicCache

from photon_grpc import demo
from photon_grpc.cli.calibrate import calibrate
from photon_grpc.cli.main import main
from photon_grpc.compose import calibration
from photon_grpc.config.kv_calibration import FILE
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.models.kv_scales import find_kv_scales
from tests.runner.models import WINDOWED, model

TEXT = Path(__file__).read_text() * 2


@torch.inference_mode()
def numbers_of(reference: Any, pieces: list[list[int]]) -> torch.Tensor:
    """Return the keys and values, [layers, 2, Hkv, tokens, D], that transformers' own cache has."""
    found = []
    for piece in pieces:
        cache = DynamicCache()
        reference(torch.tensor([piece]), past_key_values=cache)
        found.append(torch.stack([torch.stack((layer.keys, layer.values))[:, 0] for layer in cache.layers]))
    return torch.cat(found, 3)


@pytest.mark.parametrize("family", ["llama", WINDOWED])
def test_what_is_seen_is_what_transformers_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, reference = model(family)
    monkeypatch.setattr(calibration, "PIECE", 100)
    ids = [(7 * token + token * token) % 300 for token in range(250)]
    config = read_model_dir(directory)
    seen = calibration._seen(calibration._assembled(config, "cpu"), config, ids)
    numbers = numbers_of(reference, [ids[:100], ids[100:200], ids[200:]])
    for layer, expected in zip(seen, numbers, strict=True):
        torch.testing.assert_close(layer.least, expected.amin(2))
        torch.testing.assert_close(layer.most, expected.amax(2))
        torch.testing.assert_close(layer.mean, expected[0].mean(1), rtol=1e-4, atol=1e-5)


def test_the_file_is_written_beside_the_model_and_found_there(tmp_path: Path) -> None:
    directory = tmp_path / "draft"
    shutil.copytree(demo.DRAFT, directory)
    (tmp_path / "text.txt").write_text(TEXT)
    asked = [str(directory), "--text", str(tmp_path / "text.txt"), "--num-tokens", "300", "--device", "cpu"]
    done = CliRunner().invoke(calibrate, asked, catch_exceptions=False)
    assert f"wrote {directory / FILE}" in done.output and "from 300 tokens" in done.output
    found = find_kv_scales(read_model_dir(directory), "")
    assert found.source == str(directory / FILE) and found.offsets is not None
    ids = Tokenizer.from_file(directory / "tokenizer.json").encode(TEXT, add_special_tokens=False)[:300]
    numbers = numbers_of(AutoModelForCausalLM.from_pretrained(directory).eval(), [list(ids)]).clone()
    torch.testing.assert_close(found.offsets, numbers[:, 0].mean(2), rtol=2**-7, atol=1e-4)
    numbers[:, 0] -= found.offsets[:, :, None]
    # Powers of two that keep twice the largest number in range, and no larger ones than that needs.
    shares = numbers.abs().amax((3, 4)) / found.numbers
    assert bool((found.numbers.log2() % 1 == 0).all() and (shares <= 224.1).all() and (shares > 111.9).all())


def test_the_default_text_is_prose_and_code() -> None:
    text = calibration.default_text()
    assert len(text) > 200_000 and "def " in text and "The " in text


def test_what_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = model("llama")
    assert main(["calibrate", str(directory), "--device", "cpu"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    assert main(["calibrate", str(demo.DRAFT), "--text", str(tmp_path / "empty"), "--output", str(tmp_path / "o")]) == 2
    assert "the text has no tokens" in capsys.readouterr().err and not (tmp_path / "o").exists()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert main(["calibrate", str(demo.DRAFT), "--text", str(tmp_path / "bytes")]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
