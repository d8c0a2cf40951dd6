"""Ids sampled on a GPU at every level have the frequencies of the softmax over what is kept and allowed.

The frequencies are computed in float64 by transformers' warpers.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from photon_grpc import demo
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels import TRITON
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan
from tests.runner.launched import step_of
from tests.runner.served import Served

pytestmark = pytest.mark.gpu
NUM_DRAWS = 8192
TEMPERATURE = 0.7
BANNED = tuple(range(0, 4000, 2))
LEVELS = {
    SamplingLevel.PLAIN: SamplingParams(TEMPERATURE),
    SamplingLevel.FILTERED: SamplingParams(TEMPERATURE, top_k=60, top_p=0.9, min_p=0.002),
    SamplingLevel.PROCESSED: SamplingParams(TEMPERATURE),
    SamplingLevel.PROCESSED_FILTERED: SamplingParams(TEMPERATURE, top_p=0.95),
}


def expected(logits: torch.Tensor, level: SamplingLevel) -> torch.Tensor:
    """Return float64 [V], the probability of each id."""
    sampling, scores = LEVELS[level], logits.double().cpu()[None] / TEMPERATURE
    if level.is_processed:
        scores[:, [number for number in BANNED if number < scores.shape[1]]] = -torch.inf
    warpers = LogitsProcessorList()
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(None, scores).softmax(-1)[0]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Return the embedded model, whose head samples in its epilogue."""
    served = Served(demo.TARGET, device="cuda", dtype="bfloat16", eager=True)
    return step_of(served.assembled.runner)._decoder


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_frequencies_at_every_level(decoder: Decoder, level: SamplingLevel, num_rows: int) -> None:
    table = SlotTable(num_rows + 1, 4096, kv_plan(8), decoder.vocab_size, decoder.device)
    slots = range(1, num_rows + 1)
    sampling = {slot: msgspec.structs.replace(LEVELS[level], seed=1000 + slot) for slot in slots}
    bans = {"min_tokens": 2**30, "banned_until_min": BANNED} if level.is_processed else {}
    admissions = tuple(Admission(slot, (1,), 1, 0, ((1,),), sampling[slot], **bans) for slot in slots)
    batch = Batch(1, tuple(slots), (1,) * num_rows, (1,) * num_rows, admissions=admissions)
    sampler = Sampler(decoder, table, TRITON)
    generator = torch.Generator("cuda").manual_seed(6)
    with torch.inference_mode():
        table.apply(batch)
        assert sampler.level(batch) is level
        hidden = torch.randn(decoder.norm.weight.shape[0], generator=generator, device="cuda").to(decoder.dtype)
        hidden = hidden.expand(num_rows, -1).contiguous()
        rows, lengths = torch.tensor(slots, device="cuda"), torch.ones(num_rows, dtype=torch.int64, device="cuda")
        drawn = [sampler(hidden, rows, lengths + at, level).ids for at in range(NUM_DRAWS // num_rows)]
        counts = torch.bincount(torch.cat(drawn), minlength=decoder.vocab_size).double().cpu()
        probabilities = expected(decoder.logits(hidden)[0], level)
    check_chi_square(counts, probabilities)


def check_chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Check Pearson's statistic of the ids expected five times or more, the others as one; nothing impossible."""
    assert not counts[probabilities == 0.0].any()
    wanted = probabilities * counts.sum()
    is_own = wanted >= 5.0
    cells = torch.cat((wanted[is_own], wanted[~is_own].sum()[None]))
    found = torch.cat((counts[is_own], counts[~is_own].sum()[None]))
    cells, found = cells[cells > 0.0], found[cells > 0.0]
    degrees = len(cells) - 1
    assert degrees >= 10
    statistic = float(((found - cells) ** 2 / cells).sum())
    # Five standard deviations of a chi-square.
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5, (statistic, degrees)
