"""Fused decode steps on a GPU: as near to float32 as transformers in the same dtype, in graphs too, in few bytes."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.kernels import AttentionMetadata, select
from photon_grpc.layers.context import StepContext
from photon_grpc.models import Decoder, build, load
from photon_grpc.models.decoder import DecoderLayer
from photon_grpc.models.fused import fuse

pytestmark = pytest.mark.gpu
BLOCK_SIZE, PAGES, MAX_LEN = 16, 6, 96
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 64}),
}
#: Classes of configurations that are not named as their models.
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def reference(family: str) -> tuple[Path, Any]:
    """Return (directory, transformers' model in float32 on the CPU) with large random parameters."""
    prefix, options = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(prefix, prefix + "Config"))(**(SIZES | options))
    torch.manual_seed(17)
    model = getattr(transformers, prefix + "ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.08)
    directory = Path(mkdtemp(prefix="photon-fused-"))
    model.save_pretrained(directory)
    return directory, model


def loaded(family: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    card = read_model_dir(reference(family)[0])
    decoder = build(card, dtype=dtype, device="cuda", kernels=select("triton", "cuda"), max_model_len=MAX_LEN)
    load(decoder, card)
    return decoder


def fused(family: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    decoder = fuse(loaded(family, dtype))
    assert decoder is not None
    return decoder


class Rows:
    """Prompts of unequal length, each row's pages, and a cache whose unwritten bytes are NaN."""

    def __init__(self, decoder: Decoder, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.decoder = decoder
        self.prompts = [
            torch.randint(0, 512, (5 + 7 * row % 61,), generator=generator).tolist() for row in range(num_rows)
        ]
        self.tables = (torch.randperm(num_rows * PAGES, generator=generator) + 1).view(num_rows, PAGES).int().cuda()
        kept = decoder.kv_groups[0].sections[0].format
        shape = (num_rows * PAGES + 1, len(decoder.layers), 2, kept.heads, BLOCK_SIZE, kept.width)
        self.cache = torch.full(shape, torch.nan, dtype=decoder.dtype, device="cuda")

    def context(self, firsts: list[int], counts: list[int]) -> StepContext:
        """Return the next counts[b] tokens of each row from position firsts[b] on."""
        positions = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)]).cuda()
        row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
        slots = self.tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        contexts = [f + n for f, n in zip(firsts, counts, strict=True)]
        meta = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda"),
            context_len=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
            block_tables=self.tables,
            scale=self.decoder.places[0].spec.scale,
            max_query_len=max(counts),
            max_context_len=MAX_LEN,
        )
        kv = self.decoder.group_context(0, self.cache, slots, meta, history_is_settled=True)
        return StepContext(positions, (kv,))

    def prefill(self) -> None:
        """Compute all but the last token of every prompt."""
        lengths = [len(prompt) - 1 for prompt in self.prompts]
        ids = torch.tensor([token for prompt in self.prompts for token in prompt[:-1]], device="cuda")
        self.decoder.forward(ids, self.context([0] * len(lengths), lengths))

    def decode_inputs(self) -> tuple[torch.Tensor, StepContext]:
        last = torch.tensor([prompt[-1] for prompt in self.prompts], dtype=torch.int32, device="cuda")
        return last, self.context([len(prompt) - 1 for prompt in self.prompts], [1] * len(self.prompts))


@torch.inference_mode()
def last_logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([ids], device=model.device)).logits[0, -1].float().cpu() for ids in prompts])


def assert_decode_is_near_float32(decoder: Decoder, model: Any, num_rows: int) -> None:
    """Check that it is as near as transformers in the same dtype."""
    rows = Rows(decoder, num_rows)
    rows.prefill()
    mine = decoder.logits(decoder.forward(*rows.decode_inputs())).cpu()
    expected = last_logits(model, rows.prompts)
    rounded = last_logits(copy.deepcopy(model).to("cuda", decoder.dtype), rows.prompts)
    error, allowed = ((x - expected).norm() / expected.norm() for x in (mine, rounded))
    assert error < 1.3 * allowed, (error, allowed)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 30, 64, 100, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_family
@torch.inference_mode()
def test_decode_is_as_near_to_float32_as_transformers(family: str, dtype: torch.dtype, num_rows: int) -> None:
    assert_decode_is_near_float32(fused(family, dtype), reference(family)[1], num_rows)


class AnotherLayer(DecoderLayer):
    """The same formula under a name that has no chain."""


@pytest.mark.parametrize("num_rows", [3, 64, 200])
@pytest.mark.parametrize("number", [0, 1, 2])
@each_family
@torch.inference_mode()
def test_a_layer_without_a_chain_stands_among_fused_ones(family: str, number: int, num_rows: int) -> None:
    decoder = loaded(family)
    decoder.layers[number].__class__ = AnotherLayer
    mixed = fuse(decoder)
    assert mixed is not None
    assert [type(layer) is AnotherLayer for layer in mixed.layers] == [at == number for at in range(3)]
    assert_decode_is_near_float32(mixed, reference(family)[1], num_rows)


@each_family
@torch.inference_mode()
def test_prompts_are_no_farther_from_float32_than_in_the_decoder_as_it_was(family: str) -> None:
    errors = []
    model = reference(family)[1]
    for decoder in (fused(family), loaded(family)):
        rows = Rows(decoder, 9)
        counts = [len(prompt) for prompt in rows.prompts]
        ids = torch.tensor([token for prompt in rows.prompts for token in prompt], device="cuda")
        hidden = decoder.forward(ids, rows.context([0] * 9, counts))
        ends = torch.tensor(counts, device="cuda").cumsum(0) - 1
        expected = last_logits(model, rows.prompts)
        errors.append((decoder.logits(hidden[ends]).cpu() - expected).norm() / expected.norm())
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize("bucket", [2, 8, 16, 64, 96])
@torch.inference_mode()
def test_a_padded_graph_answers_like_eager_and_touches_block_0_alone(bucket: int) -> None:
    rows = Rows(fused("llama"), bucket - 1)
    rows.prefill()
    ids, ctx = rows.decode_inputs()
    before = rows.cache.clone()
    expected = rows.decoder.forward(ids, ctx)
    after = rows.cache.clone()

    padded = Rows(rows.decoder, bucket)
    padded.tables = torch.cat((rows.tables, torch.zeros_like(rows.tables[:1])))
    padded.cache = rows.cache
    lengths = [len(prompt) - 1 for prompt in rows.prompts]
    padded_ctx = padded.context([*lengths, 0], [1] * bucket)
    padded_ids = torch.cat((ids, ids[:1]))
    rows.decoder.forward(padded_ids, padded_ctx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rows.decoder.forward(padded_ids, padded_ctx)
    for _ in range(3):
        rows.cache.copy_(before)
        rows.cache[0] = torch.nan
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[:-1], expected)
        torch.testing.assert_close(rows.cache[1:], after[1:], rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_fusing_takes_no_second_copy_of_the_weights() -> None:
    decoder = loaded("llama")
    before = torch.cuda.memory_allocated()
    assert fuse(decoder) is not None
    weights = sum(t.tensor.numel() * t.tensor.element_size() for leaf in decoder.leaves() for t in leaf.targets())
    assert torch.cuda.memory_allocated() - before < weights / 20


def test_float32_and_foreign_shapes_stay_as_they_are() -> None:
    assert fuse(loaded("llama", torch.float32)) is None
