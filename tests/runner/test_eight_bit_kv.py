"""Greedy output over pages of 8 bits is that of transformers over rounded keys and values, under any settings."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.compose.calibration import calibrate
from photon_grpc.compose.kv_form import choose_kv_form
from photon_grpc.config.flags import CacheConfig, ModelFlags, SchedulerConfig, ServeConfig
from photon_grpc.config.kv_calibration import FORMAT, KVCalibration, write_calibration
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import TORCH
from tests.examples import examples
from tests.runner.eight_bits import EightBitCache, greedy, ones
from tests.runner.models import WINDOWED, model
from tests.runner.served import Served
from tests.runner.test_greedy import ASKED, COMMON

FAMILIES = "llama", WINDOWED


@functools.cache
def expected(family: str) -> list[list[int]]:
    _, reference = model(family)
    return [greedy(reference, prompt, 12, ones(reference)) for prompt in ASKED]


@given(
    family=st.sampled_from(FAMILIES),
    cache=st.builds(
        CacheConfig,
        block_size=st.sampled_from([4, 8, 16]),
        num_blocks=st.sampled_from([48, 72, 180]),
        kv_layout=st.sampled_from(["paged", "contiguous"]),
        kv_cache_dtype=st.just("fp8"),
        enable_prefix_caching=st.booleans(),
    ),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.integers(2, 9),
        max_num_batched_tokens=st.integers(1, 60),
        async_depth=st.integers(0, 1),
    ),
)
@settings(max_examples=examples(8))
def test_no_setting_changes_what_is_said(family: str, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Whatever the chunks, hits, forks, copies, preemptions, windows and runs are."""
    if family == WINDOWED and cache.kv_layout == "contiguous":
        cache = CacheConfig(cache.block_size, cache.num_blocks, kv_cache_dtype="fp8")
    served = Served(model(family)[0], cache=cache, scheduler=scheduler)
    forked = served.add([*COMMON, 1, 2], 12, num_outputs=2)
    assert served.complete(ASKED, 12) == expected(family)
    # Asked again, what is found of the prefixes has the same numbers.
    assert served.complete(ASKED, 12) == expected(family)
    assert served.outputs[forked].ids == served.outputs[forked + 1].ids == expected(family)[-1]


def test_a_storm_of_preemptions_changes_nothing() -> None:
    served = Served(model("llama")[0], cache=CacheConfig(4, 15, kv_cache_dtype="fp8"))
    assert served.complete(ASKED, 12) == expected("llama")
    assert served.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_nothing(family: str) -> None:
    cache = CacheConfig(8, 120, kv_cache_dtype="fp8")
    served = Served(model(family)[0], cache=cache, speculation="ngram", num_drafts=3)
    assert served.complete(ASKED, 12) == expected(family)


def test_blocks_are_twice_those_of_16_bits_and_the_version_names_form_and_scales() -> None:
    cache = CacheConfig(block_size=16)
    plain, eight = (
        Served(model("llama")[0], cache=each, dtype="bfloat16", max_model_len=64)
        for each in (cache, CacheConfig(block_size=16, kv_cache_dtype="fp8"))
    )
    assert plain.assembled.runner.kv.block_bytes == 2 * eight.assembled.runner.kv.block_bytes
    facts = [each.assembled.facts.numerics for each in (plain, eight)]
    assert (facts[0].kv_cache, facts[1].kv_cache[:21]) == ("bfloat16", "float8_e4m3fn, scales")
    assert facts[0].version != facts[1].version


def test_numbers_beyond_the_range_are_cut_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, reference = model("llama")
    scales, prompt = ones(reference) / 256, ASKED[2]
    rows = tuple(map(tuple, scales[:, 0].tolist()))
    revision = read_model_dir(directory).revision
    write_calibration(KVCalibration(FORMAT, revision, "float8_e4m3fn", 1, rows, rows), tmp_path / "scales.json")
    served = Served(directory, cache=CacheConfig(kv_cache_dtype="fp8", kv_calibration=str(tmp_path / "scales.json")))
    cache = EightBitCache(copy.deepcopy(reference.config), scales)
    with caplog.at_level("WARNING"):
        (said,) = served.complete([prompt], 12)
    assert said == greedy(reference, prompt, 12, scales, cache) and cache.num_saturated > 100
    load = served.engine.stats.load(served.engine.scheduler)
    assert load.saturated == cache.num_saturated
    assert caplog.text.count("beyond the range of the 8-bit KV cache") in (1, 2, 3)


def config_of(directory: Path, **cache: str) -> ServeConfig:
    return ServeConfig(model=ModelFlags(model=str(directory)), cache=CacheConfig(**cache))  # type: ignore[arg-type]


def test_what_fp8_needs_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = model("llama")
    card, cuda = read_model_dir(directory), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="--kv-calibration is for --kv-cache-dtype fp8") as failure:
        choose_kv_form(config_of(directory, kv_calibration="x.json"), card, torch.device("cpu"), TORCH)
    assert failure.value.field == "kv_calibration"
    with pytest.raises(ConfigError, match="needs the Triton kernels; leave --kernels torch out"):
        choose_kv_form(config_of(directory, kv_cache_dtype="fp8"), card, cuda, TORCH)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9, this one has 8\.0"):
        choose_kv_form(config_of(directory, kv_cache_dtype="fp8"), card, cuda, object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"absent\.json: there is no such file"):
        Served(directory, cache=CacheConfig(kv_cache_dtype="fp8", kv_calibration="absent.json"))


def test_latents_are_refused_where_doctor_sees_it_and_are_not_calibrated() -> None:
    directory, _ = model("deepseek2")
    with pytest.raises(ConfigError, match="cannot hold the latents of DeepseekV2ForCausalLM: leave it out") as failure:
        config = config_of(directory, kv_cache_dtype="fp8")
        choose_kv_form(config, read_model_dir(directory), torch.device("cpu"), TORCH)
    assert failure.value.field == "kv_cache_dtype"
    with pytest.raises(ConfigError, match=r"has latent attention, .* needs no scales"):
        calibrate(directory, "text", 8, "cpu")


def test_a_model_without_scales_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Served(model("llama")[0], cache=CacheConfig(num_blocks=30, kv_cache_dtype="fp8"))
    assert (
        "KV cache: float8_e4m3fn, scales of 1; 30 blocks of 16 tokens, each 1/4 of the bytes of float32" in caplog.text
    )
    assert "no scales" in caplog.text
