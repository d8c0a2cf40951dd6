"""Every family computes what transformers computes, however the prompt is cut and paged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from photon_grpc.config.families import FAMILIES
from photon_grpc.core.kv import KVGroup, PageFormat, Section
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.models.decoder import Decoder, LayerPlace
from tests.models import reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Decoder, Path]]:
    """Map a variant to (transformers' model, ours of the same files, the files)."""
    made: dict[str, tuple[Any, Decoder, Path]] = {}

    def get(variant: str) -> tuple[Any, Decoder, Path]:
        if variant not in made:
            model = reference.make_model(variant)
            path = reference.save(model, tmp_path_factory.mktemp("model") / variant)
            made[variant] = model, reference.load_decoder(path), path
        return made[variant]

    return get


#: Most of two prompts, then one token a row.
BY_ONE = [30, 1, 58, *[1] * 36]
#: Block size, tokens of each row in a step: whole prompts, parts of them, single tokens.
CUTS: list[tuple[int, list[int]]] = [(16, [1000]), (8, [11, 3, 1, 26]), (64, BY_ONE)]
#: In `make test` of MIXED alone, which has layers of each kind: with windows and without.
MORE_CUTS: list[tuple[int, list[int]]] = [
    (8, [1000]),
    (64, [1000]),
    (16, [5, 1, 17]),
    (64, [33, 2]),
    (8, [1]),
    (16, [1]),
]
MIXED = "qwen3-window-between"


@pytest.fixture(scope="module")
def expected_of(pair: Any) -> Callable[[str], list[torch.Tensor]]:
    """Map a variant to transformers' logits of the prompts."""
    return functools.cache(
        lambda variant: [reference.reference_logits(pair(variant)[0], ids) for ids in reference.prompts()]
    )


@pytest.mark.parametrize("variant", reference.VARIANTS)
@pytest.mark.parametrize(
    ("block_size", "chunks"), [*CUTS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_CUTS)]
)
def test_logits_equal_transformers(
    pair: Any, expected_of: Any, variant: str, block_size: int, chunks: list[int]
) -> None:
    check(pair(variant)[1], expected_of(variant), block_size, chunks)


@pytest.mark.parametrize(("block_size", "chunks"), MORE_CUTS)
def test_in_blocks_of_every_size_any_parts_of_a_prompt_have_the_logits_of_transformers(
    pair: Any, expected_of: Any, block_size: int, chunks: list[int]
) -> None:
    check(pair(MIXED)[1], expected_of(MIXED), block_size, chunks)


def check(decoder: Decoder, expected_logits: list[torch.Tensor], block_size: int, chunks: list[int]) -> None:
    found = reference.paged_logits(decoder, reference.prompts(), block_size=block_size, chunks=chunks)
    for expected, logits in zip(expected_logits, found, strict=True):
        assert logits.dtype == torch.float32
        assert expected.std() > 0.5  # else closeness says nothing
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama3-tied", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(pair: Any, variant: str) -> None:
    model, _, path = pair(variant)
    decoder = reference.load_decoder(path, torch.bfloat16)
    for ids, logits in zip(
        reference.prompts(),
        reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[9]),
        strict=True,
    ):
        expected = reference.reference_logits(model, ids)
        assert logits.dtype == torch.float32
        assert (logits - expected).norm() / expected.norm() < 0.03


def test_no_rows_need_logits(pair: Any) -> None:
    _, decoder, _ = pair("llama3-tied")
    with torch.inference_mode():
        logits = decoder.logits(torch.empty(0, reference.SIZES["hidden_size"]))
    assert logits.shape == (0, reference.SIZES["vocab_size"])


def test_a_decoder_describes_itself(pair: Any) -> None:
    model, decoder, _ = pair("qwen3")
    assert decoder.kv_groups == (KVGroup((Section(PageFormat(2, 24, "float32"), (0, 1, 2)),)),)
    assert decoder.places == (LayerPlace(0, 0, AttentionSpec(4, 24**-0.5, torch.float32)),)
    assert decoder.num_parameters == model.num_parameters()


def test_every_known_architecture_is_compared_here() -> None:
    compared = {f"{prefix}ForCausalLM" for prefix, _ in reference.VARIANTS.values()}
    # tests/models/test_families.py has the model with images.
    assert compared | {"Gemma3ForConditionalGeneration"} == FAMILIES.keys()
