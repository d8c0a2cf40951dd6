"""A model split over ranks: each loads its part of every tensor; together they compute what transformers does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import chosen_format
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.layers import unquantized
from photon_grpc.layers.parallel import Mesh
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import Decoder, build, load
from photon_grpc.models.fused import with_chains
from tests.models import reference


class Ranks:
    """Threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.partials: dict[int, torch.Tensor] = {}


class ThreadGroup:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank = rank
        self.size = ranks.size
        self._ranks = ranks

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self._ranks.partials[self.rank] = partial
        self._ranks.barrier.wait()
        total: torch.Tensor = sum(self._ranks.partials[rank] for rank in range(self.size))  # type: ignore[assignment]
        self._ranks.barrier.wait()
        return total


def of_two_ranks(path: Path, quantization: str = "auto") -> list[Decoder]:
    config, kernels, ranks = read_model_dir(path), select("torch", "cpu"), Ranks(2)
    decoders = []
    for rank in range(2):
        decoder = build(
            config,
            dtype=torch.float32,
            device="cpu",
            kernels=kernels,
            max_model_len=reference.MAX_LEN,
            mesh=Mesh(tp=ThreadGroup(ranks, rank)),
            method=methods(chosen_format(config.quantization, quantization)),
        )
        load(decoder, config)
        decoders.append(decoder)
    return decoders


@pytest.mark.parametrize(
    "variant", ["llama3-tied", "llama-biases", "qwen2", "qwen3", "mistral-window", "smollm3", "gemma3"]
)
def test_two_ranks_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = reference.make_model(variant)
    decoders = of_two_ranks(reference.save(model, tmp_path))

    def logits(decoder: Decoder) -> list[torch.Tensor]:
        return reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[11, 3, 1, 26])

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(logits, decoders)
    for ids, mine, others in zip(reference.prompts(), first, second, strict=True):
        torch.testing.assert_close(mine, reference.reference_logits(model, ids), atol=1e-4, rtol=0)
        assert torch.equal(mine, others)


def test_each_rank_keeps_its_part(tmp_path: Path) -> None:
    whole = reference.load_decoder(reference.save(reference.make_model("llama-biases"), tmp_path))
    heads = whole.kv_groups[0].sections[0].format.heads
    layers = [decoder.layers[0] for decoder in of_two_ranks(tmp_path)]
    assert [layer.attention.kv.format.heads for layer in layers] == [heads // 2] * 2
    assert [layer.mlp.down.in_features for layer in layers] == [whole.layers[0].mlp.down.in_features // 2] * 2


def test_a_kernel_never_adds_a_partial_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquantized, "pack", lambda weight, bias: None)
    path = reference.save(reference.make_model("qwen2"), tmp_path)
    assert with_chains(reference.load_decoder(path)) is not None
    assert with_chains(of_two_ranks(path)[0]) is None


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    path = reference.save(reference.make_model("llama-untied-linear"), tmp_path)
    with pytest.raises(ModelLoadError, match="num_kv_heads 1 cannot be shared out over 2 ranks"):
        of_two_ranks(path)
