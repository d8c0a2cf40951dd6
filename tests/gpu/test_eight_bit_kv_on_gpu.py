"""Keys and values of 8 bits in the whole step on a GPU: steps that are replayed, and the count of what was cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from photon_grpc.config.flags import CacheConfig
from photon_grpc.config.kv_calibration import FORMAT, KVCalibration, write_calibration
from photon_grpc.config.model_dir import read_model_dir
from tests.runner.eight_bits import greedy, ones
from tests.runner.models import WINDOWED, model
from tests.runner.served import Served
from tests.runner.test_greedy import ASKED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["llama", WINDOWED])
def test_greedy_output_equals_transformers_over_rounded_keys(family: str, eager: bool) -> None:
    directory, reference = model(family)
    cache = CacheConfig(block_size=16, num_blocks=300, kv_cache_dtype="fp8")
    served = Served(directory, device="cuda", cache=cache, eager=eager)
    assert served.complete(ASKED, 12) == [greedy(reference, prompt, 12, ones(reference)) for prompt in ASKED]


def test_what_is_cut_is_counted_some_steps_later(tmp_path: Path) -> None:
    directory, reference = model("llama")
    rows = tuple(map(tuple, (ones(reference)[:, 0] / 256).tolist()))
    revision = read_model_dir(directory).revision
    write_calibration(KVCalibration(FORMAT, revision, "float8_e4m3fn", 1, rows, rows), tmp_path / "scales.json")
    cache = CacheConfig(kv_cache_dtype="fp8", num_blocks=64, kv_calibration=str(tmp_path / "scales.json"))
    served = Served(directory, device="cuda", cache=cache)
    served.complete([ASKED[2]], 200)
    assert served.engine.stats.load(served.engine.scheduler).saturated > 100
