"""EAGLE-3 heads: drafts are those of the published algorithm in plain torch, and heads that do not fit are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.embedded_model.eagle3 import Chain, Eagle3, embedded_target, observed
from benchmarks.embedded_model.llama import Llama
from photon_grpc import LLM, demo
from photon_grpc.config.eagle3 import read_eagle3_dir
from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.core.batch import Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.drafting import NoDrafting
from photon_grpc.errors import ConfigError, ModelLoadError
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import ScaledEmbedding
from photon_grpc.models import weights
from photon_grpc.models.eagle3 import build_head
from photon_grpc.models.fused import FusedEmbedding
from photon_grpc.runner.eagle3 import Eagle3Drafter
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.heads import random_head, replay_drafts
from tests.runner.models import model
from tests.runner.served import Served

PROMPTS = [[0, 300, 9, 200, 3], [17] * 8, [*range(40, 70)]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    random_head(path)
    return path


class Recorded:
    """What a drafter drafted: the known ids of a row, and the drafts behind them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._drafter, self._table = runner.drafter, runner.table
        self.max_drafts = runner.drafter.max_drafts
        self.found: list[tuple[list[int], list[int]]] = []
        runner.drafter = self  # type: ignore[assignment]

    def draft(self, batch: Batch) -> None:
        self._drafter.draft(batch)
        for slot, yields in zip(batch.slots, batch.yields, strict=True):
            known = int(self._table.numbers.num_known[slot])
            ids = self._table.token_ids[slot, : known + yields - 1].tolist()
            self.found.append((ids[:known], ids[known:]))

    def ingest(self, batch: Batch) -> None:
        self._drafter.ingest(batch)


@torch.no_grad()
def drafted(head: Eagle3, target: Llama, known: list[int], count: int) -> list[int]:
    """Return the greedy drafts behind these ids, with nothing cached."""
    ids = torch.tensor([known])
    _, states = observed(target, ids[:, :-1])
    states, chain, drafts, following = head.fc(states), Chain([], []), [], ids[:, 1:]
    for _ in range(count):
        logits, states = head.draft(target.model.embed_tokens(following), states, chain)
        drafts.append(int(head.kept[logits[0, -1].argmax()]))
        # Only the last position is read from now on.
        following = torch.full_like(following, drafts[-1])
    return drafts


@pytest.mark.parametrize(("chunk", "in_graphs"), [(2048, False), (7, False), (2048, True)])
def test_drafts_are_those_of_the_published_algorithm(directory: Path, chunk: int, in_graphs: bool) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=chunk)
    served = Served(demo.TARGET, speculation=str(directory), num_drafts=3, dtype="float32", scheduler=scheduler)
    runner = served.assembled.runner
    assert isinstance(runner, ModelRunner)
    graphs = replay_drafts(runner) if in_graphs else None
    recorded = Recorded(runner)
    served.complete(PROMPTS, 12)
    assert graphs is None or {size for _, size in graphs._replays} == {4}
    head, target = random_head(directory), embedded_target(torch.device("cpu"))
    assert len(recorded.found) > 20
    for known, drafts in recorded.found:
        assert drafts == drafted(head, target, known, len(drafts)), known


def test_outputs_are_those_without_a_head(directory: Path) -> None:
    samplings = [SamplingParams(0.0), SamplingParams(1.1, seed=3, top_k=30), SamplingParams(0.9, presence_penalty=1.0)]
    plain, drafting = (Served(demo.TARGET, dtype="float32", speculation=name) for name in ("", str(directory)))
    for sampling in samplings:
        assert plain.complete(PROMPTS, 16, sampling=sampling) == drafting.complete(PROMPTS, 16, sampling=sampling)


def test_a_forward_that_failed_between_layers_harms_no_later_one(directory: Path) -> None:
    served = Served(demo.TARGET, dtype="float32", speculation=str(directory))
    runner = served.assembled.runner
    assert isinstance(runner, ModelRunner)
    drafter = getattr(runner.drafter, "_drafter", runner.drafter)
    assert isinstance(drafter, Eagle3Drafter)
    drafter._head.before(2, torch.zeros(99, 256), None, StepContext(torch.arange(99), ()))
    assert served.complete(PROMPTS, 8) == Served(demo.TARGET, dtype="float32").complete(PROMPTS, 8)
    assert not runner.num_failures


def test_an_embedding_that_scales_is_refused_in_fused_layers_too(directory: Path) -> None:
    scaled = ScaledEmbedding("", 4096, 256, dtype=torch.float32)
    for embedding in (scaled, FusedEmbedding(scaled, Mock())):
        target = Mock(embedding=embedding, vocab_size=4096, layers=range(8))
        with pytest.raises(ModelLoadError, match="scales its embedding"):
            build_head(read_eagle3_dir(directory), target, 8)


def changed(directory: Path, to: Path, *, config: dict[str, object], without: str = "", d2t: int = 0) -> str:
    shutil.copytree(directory, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    tensors = load_file(to / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + d2t
    save_file({name: value for name, value in tensors.items() if name != without}, to / "model.safetensors")
    return str(to)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"vocab_size": 5000}}, "the head's vocab_size is 5000, the model's 4096"),
        ({"config": {"hidden_size": 128, "head_dim": 64}}, "the head's hidden_size is 128, the model's 256"),
        ({"config": {"num_hidden_layers": 2}}, "num_hidden_layers must be 1 in an EAGLE-3 head, is 2"),
        ({"config": {"draft_vocab_size": 9000}}, "draft_vocab_size is 9000, more than vocab_size 4096"),
        ({"config": {"target_hidden_size": 512}}, "target_hidden_size is 512; only hidden_size, 256"),
        (
            {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}},
            "the head takes states before layers 2, 4, 8; the model has 8 layers",
        ),
        ({"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}}}, "must name 3 layers"),
        ({"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3, 4]}}}, "must name 3 layers"),
        ({"config": {"eagle_config": {"use_aux_hidden_state": False}}}, "is false, which is not supported"),
        ({"config": {}, "without": "fc.weight"}, "are missing: fc.weight"),
        ({"config": {}, "without": "d2t"}, "are missing: d2t"),
        ({"config": {}, "d2t": 2}, "d2t names ids from 2 to 4097; they must differ and be below 4096"),
        ({"config": {"draft_vocab_size": 64}}, "lm_head.weight has shape"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name_before_weights_are_read(
    directory: Path, tmp_path: Path, change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "fill", fail_to_load)
    name = changed(directory, tmp_path / "head", **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message) as raised:
        LLM(device="cpu", max_num_seqs=2, speculative_model=name)
    assert raised.value.field == "speculative_model"


def fail_to_load(*args: object) -> None:
    raise AssertionError("weights were read")


def test_a_model_that_scales_its_embedding_takes_no_head(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "fill", fail_to_load)
    name = changed(directory, tmp_path / "head", config={"hidden_size": 64, "vocab_size": 320, "draft_vocab_size": 300})
    windowed, _ = model("gemma3")
    with pytest.raises(ConfigError, match="scales its embedding takes no EAGLE-3 head"):
        LLM(str(windowed), device="cpu", max_num_seqs=2, speculative_model=name)


def test_a_plain_step_keeps_the_streams_that_any_step_keeps(directory: Path) -> None:
    served = Served(demo.TARGET, dtype="float32", speculation=str(directory))
    runner = served.assembled.runner
    assert isinstance(runner, ModelRunner)
    drafter = getattr(runner.drafter, "_drafter", runner.drafter)
    assert isinstance(drafter, Eagle3Drafter)
    drafter._head.streams.normal_()
    before = torch.tensor([7, 3, 9])
    for slots, counts in (((3, 1), (1, 1)), ((3, 1, 2), (1, 1, 1))):
        kept = []
        for carry, computed in (
            (lambda: drafter._carry_left(slots), before + 1),  # noqa: B023
            (lambda: drafter._carry(Batch(0, slots, counts, counts), [1] * len(slots)), before),  # noqa: B023
        ):
            drafter._carried.zero_()
            drafter._first.zero_()
            runner.table.numbers.num_computed[1:4] = computed
            carry()
            kept.append((drafter._carried.clone(), drafter._first.clone()))
        (one, at), (other, at_other) = kept
        assert torch.equal(one, other) and torch.equal(at, at_other) and at.sum() >= 16


class Prepared(NoDrafting):
    """Drafts nothing, and might."""

    def computes_prompt(self, seq: Sequence, num_running: int) -> bool:
        return num_running < 2


def test_what_drafts_nothing_computes_nothing_of_the_head(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(demo.TARGET, dtype="float32", speculation=str(directory))
    runner = served.assembled.runner
    assert isinstance(runner, ModelRunner)
    drafter = getattr(runner.drafter, "_drafter", runner.drafter)
    assert isinstance(drafter, Eagle3Drafter)
    fc, rows = drafter._head.fc, []

    def counted(x: torch.Tensor, ctx: None) -> torch.Tensor:
        rows.append(len(x))
        return fc(x, ctx)

    monkeypatch.setattr(drafter._head, "fc", counted)
    # Of a request without drafts not even the prompt.
    served.add(PROMPTS[0], 4, max_drafts=0)
    served.run()
    assert not rows
    served.engine.scheduler.drafting = Prepared()
    for prompt, most in zip(PROMPTS, (7, 0, 7), strict=True):
        served.add(prompt, 4, max_drafts=most)
    served.run()
    # Of the third no prompt, since it is not alone.
    assert sum(rows) == len(PROMPTS[0])
