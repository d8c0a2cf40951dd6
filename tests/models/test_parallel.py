"""A model split over ranks: each loads its part of every tensor; together they compute what transformers does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS, WeightFormat, chosen_format
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.kernels.linear import slices
from photon_grpc.kernels.sampling import sample
from photon_grpc.layers import unquantized
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.epilogues import Parts, Pending
from photon_grpc.layers.experts import Experts
from photon_grpc.layers.parallel import vocabulary
from photon_grpc.layers.parallel.group import LoneRank, Mesh, MeshSizes, add_gathered, mesh_of
from photon_grpc.layers.parallel.vocabulary import VocabularyParallelHead
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models import Decoder, build, load
from photon_grpc.models.fused import num_fused, with_chains
from tests.kernels.sampling import metadata_of
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

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self._ranks.partials[self.rank] = part
        self._ranks.barrier.wait()
        parts = torch.stack([self._ranks.partials[rank] for rank in range(self.size)])
        self._ranks.barrier.wait()
        return parts

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        if pending is None or len(h) < 2:
            return add_gathered(self, h, parts.whole, bias)
        gathered, half = self.gather(parts.whole), len(h) // 2
        for rows in (slice(0, half), slice(half, len(h))):
            # As planes do with many rows: what follows waits for each.
            pending.append((rows, partial(slices.add_launch, h[rows], gathered[:, rows], bias)))
        return False


def of_ranks(path: Path, sizes: MeshSizes, quantization: str | WeightFormat = "auto") -> list[Decoder]:
    """Return the decoder of each rank, whose groups meet where their place in the other ways is the same."""
    config, kernels = read_model_dir(path), select("torch", "cpu")
    form = chosen_format(config.quantization, quantization) if isinstance(quantization, str) else quantization
    num_ranks, of_stage = sizes.of_stage * sizes.stages, sizes.of_stage
    world, stages = Ranks(num_ranks), [Ranks(of_stage) for _ in range(sizes.stages)]
    columns = [Ranks(sizes.stages) for _ in range(of_stage)]
    decoders = []
    for rank in range(num_ranks):
        stage, place = divmod(rank, of_stage)
        # In the order in which a mesh asks for those that are not of all ranks.
        others = iter(each for each in (stages[stage], columns[place]) if 1 < each.size < num_ranks)

        def group(at: int, size: int, others: Iterator[Ranks] = others) -> ThreadGroup:
            return ThreadGroup(world if size == num_ranks else next(others), at)

        decoder = build(
            config,
            dtype=torch.float32,
            device="cpu",
            kernels=kernels,
            max_model_len=reference.MAX_LEN,
            mesh=mesh_of(rank, sizes, group),
            method=methods(form),
        )
        load(decoder, config)
        decoders.append(decoder)
    return decoders


def of_two_ranks(path: Path, quantization: str = "auto") -> list[Decoder]:
    return of_ranks(path, MeshSizes(2), quantization)


def chunked_logits(decoder: Decoder) -> list[torch.Tensor]:
    return reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[11, 3, 1, 26])


def chunked_states(decoder: Decoder) -> list[torch.Tensor]:
    """Return what the head is given."""
    decoder.head = cast(Any, SimpleNamespace(logits=lambda hidden: hidden))
    return chunked_logits(decoder)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama3-tied", "llama-biases", "llama-untied-linear", "qwen2", "qwen3", "mistral-window", "smollm3"),
        *("gemma3", "qwen3moe", "qwen3moe-between", "mixtral", "deepseek2", "deepseek2-yarn-query-latent"),
        *("phi3", "phi3-window-partial-longrope-tied", "olmo2", "olmo2-tied-bias"),
    ],
)
def test_two_ranks_equal_transformers(variant: str, tmp_path: Path) -> None:
    check_equal(variant, MeshSizes(2), tmp_path)


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        *((variant, MeshSizes(experts=2)) for variant in ("qwen3moe", "qwen3moe-between", "mixtral", "deepseek2")),
        *((variant, MeshSizes(stages=2)) for variant in ("llama3-tied", "llama-untied-linear", "olmo2", "mixtral")),
        ("mistral-window", MeshSizes(stages=2)),
        ("qwen3moe", MeshSizes(2, 2)),
        ("qwen3moe", MeshSizes(1, 2, 2)),
        ("qwen3", MeshSizes(2, stages=2)),
    ],
)
def test_experts_and_stages_over_ranks_equal_transformers(variant: str, sizes: MeshSizes, tmp_path: Path) -> None:
    check_equal(variant, sizes, tmp_path)


def check_equal(variant: str, sizes: MeshSizes, path: Path) -> None:
    """Compare the logits of all ranks with those of transformers, and with each other to the bit."""
    model = reference.make_model(variant)
    decoders = of_ranks(reference.save(model, path), sizes)
    with ThreadPoolExecutor(len(decoders)) as threads:
        first, *others = threads.map(chunked_logits, decoders)
        for at, ids in enumerate(reference.prompts()):
            torch.testing.assert_close(first[at], reference.reference_logits(model, ids), atol=1e-4, rtol=0)
            assert all(torch.equal(first[at], other[at]) for other in others)
        if sizes.of_stage == 1:
            # Stages cut no sum. A head of fewer ids may be multiplied in another order, by a library on a CPU.
            *states, expected = threads.map(chunked_states, [*decoders, reference.load_decoder(path)])
            assert all(all(map(torch.equal, each, expected)) for each in states)


def test_each_rank_keeps_its_part(tmp_path: Path) -> None:
    whole = reference.load_decoder(reference.save(reference.make_model("llama-biases"), tmp_path))
    heads = whole.kv_groups[0].sections[0].format.heads
    layers = [decoder.layers[0] for decoder in of_two_ranks(tmp_path)]
    assert [layer.attention.kv.format.heads for layer in layers] == [heads // 2] * 2
    assert [layer.mlp.down.in_features for layer in layers] == [whole.layers[0].mlp.down.in_features // 2] * 2


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gemma3"])
def test_fused_layers_add_the_sums_of_all_ranks(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquantized, "pack", lambda weight, bias: None)
    model = reference.make_model(variant)
    fused = [with_chains(decoder) for decoder in of_two_ranks(reference.save(model, tmp_path))]

    def logits(decoder: Decoder | None) -> list[torch.Tensor]:
        assert decoder is not None and num_fused(decoder) == len(decoder.layers)
        return reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[11, 3, 1, 26])

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(logits, fused)
    for ids, mine, others in zip(reference.prompts(), first, second, strict=True):
        torch.testing.assert_close(mine, reference.reference_logits(model, ids), atol=1e-4, rtol=0)
        assert torch.equal(mine, others)


@pytest.mark.parametrize(
    ("field", "changes", "size"),
    [
        ("num_kv_heads", {"num_kv_heads": 2, "num_heads": 6}, 3),
        ("num_heads", {"num_kv_heads": 1, "num_heads": 3}, 2),
        ("intermediate_size", {"intermediate_size": 65}, 2),
        ("vocab_size", {"vocab_size": 3}, 4),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(
    field: str, changes: dict[str, int], size: int, tmp_path: Path
) -> None:
    config = read_model_dir(reference.save(reference.make_model("llama3-tied"), tmp_path))
    fitting = {"num_kv_heads": 4, "num_heads": 4, "intermediate_size": 64}
    odd = replace(config, **(fitting | changes))
    with pytest.raises(ModelLoadError, match=rf"{field} \d+ cannot be shared out over {size} ranks"):
        build(
            odd, dtype=torch.float32, device="cpu", kernels=select("torch", "cpu"), max_model_len=8,
            mesh=Mesh(tp=LoneRank(0, size), world=LoneRank(0, size)),
        )  # fmt: skip


@pytest.mark.parametrize("num_ids", [64, 100, 1003, 4096])
def test_the_vocabulary_is_shared_out_whole(num_ids: int) -> None:
    embedding = Embedding("embed", num_ids, 8, dtype=torch.float32)
    for size in (2, 3, 4):
        heads = [
            VocabularyParallelHead(
                "head",
                embedding,
                tied=False,
                method=Unquantized(),
                sample=sample.reference,
                group=LoneRank(rank, size),
            )
            for rank in range(size)
        ]
        assert [one for head in heads for one in range(num_ids)[head.ids]] == list(range(num_ids))
        assert all(head.num_parameters for head in heads)


def test_all_ranks_draw_the_id_that_a_whole_head_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(best: sample.TileBest) -> torch.Tensor:
        # As the kernel takes them.
        assert all(each.is_contiguous() for each in best[:3])
        return sample.merge(best)

    monkeypatch.setattr(vocabulary, "merge", merged)
    path = reference.save(reference.make_model("llama3-tied"), tmp_path)
    whole, decoders = reference.load_decoder(path), of_two_ranks(path)
    hidden = torch.randn(12, whole.embedding.weight.shape[1], generator=torch.Generator().manual_seed(1))
    metadata = metadata_of(torch.linspace(0.0, 1.5, 12))
    with ThreadPoolExecutor(2) as threads:
        drawn = list(threads.map(lambda decoder: decoder.sample(hidden, metadata), decoders))
    assert torch.equal(drawn[0], whole.sample(hidden, metadata)) and torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [("llama3-tied", MeshSizes(2)), ("llama3-tied", MeshSizes(1, stages=2)), ("gemma3", MeshSizes(2))],
    ids=str,
)
def test_ranks_have_the_ids_of_an_embedding_of_8_bits(variant: str, sizes: MeshSizes, tmp_path: Path) -> None:
    path = reference.save(reference.make_model(variant), tmp_path)
    # Layers keep their bits: scales of their rows differ between ranks.
    form = replace(FORMATS["int8"], ignored=("re:.*",), head="int8", embedding="int8")
    (whole,), decoders = of_ranks(path, MeshSizes(1), form), of_ranks(path, sizes, form)
    with ThreadPoolExecutor(len(decoders)) as threads:
        first, second = threads.map(chunked_logits, decoders)
    for expected, mine, other in zip(chunked_logits(whole), first, second, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)
        assert torch.equal(mine, other)


@pytest.mark.parametrize("variant", ["qwen3moe", "mixtral"])
def test_each_rank_reads_its_part_of_stacked_experts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unquantized, "pack", lambda weight, bias: None)
    model = reference.make_model(variant)
    of_each = of_two_ranks(reference.save(model, tmp_path / "each"))
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for mine, theirs in zip(of_two_ranks(tmp_path / "stacked"), of_each, strict=True):
        for leaf, same in zip(mine.leaves(), theirs.leaves(), strict=True):
            linears = zip(leaf.linears(), same.linears(), strict=True) if isinstance(leaf, Experts) else ()
            assert all(torch.equal(one.weight, other.weight) for one, other in linears)
