"""What formats of weights cost in quality: how it is measured, and that those of 8 bits stay within their limits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.quality import rounding
from benchmarks.quality.__main__ import Texts, compute, distance, flags_of, own_rounding
from benchmarks.quality.compare import DEFECT_MARGIN, Distance, first_differences
from benchmarks.quality.held_out import beginnings, held_out_documents, windows
from benchmarks.quality.rounding import KV_FORMAT, KV_LIMIT, ROUNDINGS, Rounding, round_rows, round_weight
from photon_grpc import demo
from photon_grpc.config.quantization import FORMATS
from photon_grpc.kernels.linear import products8, quantize
from photon_grpc.kernels.linear.products8 import Weight8


def test_divergence_and_losses_are_those_of_torch():
    reference, other = torch.randn(50, 7).double(), torch.randn(50, 7).double()
    ids = [position % 7 for position in range(50)]
    found = Distance()
    for part in (slice(0, 20), slice(20, 50)):
        found.add(reference[part], other[part], ids[part])
    expected = F.kl_div(other.log_softmax(-1), reference.softmax(-1), reduction="none").sum(-1)
    assert found.mean_divergence == pytest.approx(float(expected.mean()))
    assert found.divergence_at(0.9) == pytest.approx(float(expected.sort().values[45]))
    assert found.perplexity == pytest.approx(float(F.cross_entropy(other, torch.tensor(ids)).exp()))
    assert found.reference_perplexity == pytest.approx(float(F.cross_entropy(reference, torch.tensor(ids)).exp()))


def test_a_flip_has_the_margin_of_the_reference():
    reference = torch.tensor([[2.0, 0.0, -1.0], [2.0, 1.7, 0.0], [1.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, 0.0, 9.0], [1.0, 1.1, 0.0], [1.0, 0.9, 0.0]])
    found = Distance()
    found.add(reference, other, [0, 0, 0])
    assert found.flips.tolist() == pytest.approx([2.0, 0.3], abs=1e-6)
    assert (found.num_positions, found.num_defects) == (3, 1)


def test_drift_is_the_first_id_that_differs():
    assert first_differences([[1, 2, 3], [1, 2], [4]], [[1, 2, 4], [1, 2], [5]]) == [2, 2, 0]


def test_every_format_of_the_flag_is_measured():
    assert set(ROUNDINGS) == set(FORMATS)


@pytest.mark.parametrize("name", [name for name in ROUNDINGS if name != "int4-g128"])
def test_rounding_is_to_the_nearest_that_the_format_has(name):
    """Half a step of the block's grid; e4m3 has three bits behind the first."""
    of, weight = ROUNDINGS[name], torch.randn(256, 256) * torch.logspace(-3, 0, 256)
    rows, columns = (size or 256 for size in of.block)
    largest = weight.abs().view(256 // rows, rows, 256 // columns, columns).amax((1, 3))
    largest = largest.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    step = {"int8": largest / 127, "fp8": torch.maximum(weight.abs() / 8, largest / 2**14)}[of.kind]
    assert bool(((round_weight(weight, of) - weight).abs() <= 0.5001 * step).all())


def test_four_bits_have_less_error_than_a_grid_that_ends_at_the_largest_number():
    weight = torch.randn(256, 256)
    weight[3, :128] = 0.0
    groups = weight.view(256, 2, 128)
    step = groups.abs().amax(-1, keepdim=True) / 7.5
    plain = ((groups / step).round().clamp(-8, 7) * step).nan_to_num(0.0)
    found = round_weight(weight, ROUNDINGS["int4-g128"])
    error, of_plain = ((one.reshape(groups.shape) - groups).square().sum(-1) for one in (found, plain))
    assert bool((error <= of_plain * 1.0001).all()) and float(error.sum()) < 0.9 * float(of_plain.sum())
    assert not found[3, :128].any()


def test_rounding_twice_changes_nothing_and_zeros_stay():
    of = Rounding("int8", (1, 32), has_rounded_activations=True, limit=0.0)
    weight = torch.randn(4, 64)
    weight[1] = 0.0
    once = round_weight(weight, of)
    assert torch.allclose(round_weight(once, of), once, rtol=1e-6) and not once[1].any()
    assert not round_rows(weight, of)[1].any()


@pytest.fixture(scope="module")
def texts() -> Texts:
    documents = held_out_documents(None)
    return Texts(windows(documents, 1024, 1), beginnings(documents, 16, 2), 12)


@pytest.fixture(scope="module")
def reference(texts: Texts) -> list[torch.Tensor]:
    return compute(texts, {}).logits


@pytest.mark.parametrize("name", ["int8-g128", "int8", pytest.param("int8-g32", marks=pytest.mark.full)])
def test_eight_bits_stay_within_their_limits_on_text_that_was_not_learnt(name, texts, reference):
    computed = compute(texts, {"quantization": name})
    found = distance(texts, reference, computed.logits)
    assert found.perplexity_ratio - 1 <= ROUNDINGS[name].limit
    assert found.num_defects == 0
    assert {len(output) for output in computed.outputs} == {12}


def exact_product(x: torch.Tensor, weight: Weight8, generator: torch.Generator) -> torch.Tensor:
    """Return the product of the rounded numbers in float64, rounded to x's dtype up to its last bit."""
    rows = quantize.reference(x, weight.values.dtype, weight=weight.norm)
    scaled = (
        rows.values.double() @ weight.values.double().t() * weight.scales[0].double() * rows.scales[:, None].double()
    )
    last_bits = torch.randint(-1, 2, scaled.shape, generator=generator) * torch.finfo(x.dtype).eps / 2
    return (scaled * (1.0 + last_bits)).to(x.dtype)


@pytest.mark.full
def test_flips_with_activations_of_eight_bits_are_those_that_last_bits_of_exact_products_decide(
    texts, reference, monkeypatch
):
    """Rounded activations amplify a last bit, so computations differ from each other as much as from 16 bits."""
    computed = compute(texts, {"quantization": "w8a8"})
    found = distance(texts, reference, computed.logits)
    assert found.perplexity_ratio - 1 <= ROUNDINGS["w8a8"].limit
    alone, draws = texts._replace(prompts=[], num_greedy=0), []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        monkeypatch.setattr(products8, "product", partial(exact_product, generator=generator))
        draws.append(compute(alone, {"quantization": "w8a8"}).logits[0].double())
    (expected,), (of_engine,) = reference, computed.logits
    first = expected.argmax(-1, keepdim=True)
    for position in found_defects(expected, of_engine):
        ids = first[position], of_engine[position].argmax()
        of_draws = torch.stack([draw[position, ids[0]] - draw[position, ids[1]] for draw in draws])
        margin = of_engine[position, ids[0]].double() - of_engine[position, ids[1]].double()
        assert abs(float(margin - of_draws.mean())) <= 4.0 * float(of_draws.std()), position


def found_defects(expected: torch.Tensor, of_format: torch.Tensor) -> list[int]:
    """Return the positions of flips that the reference has a margin for."""
    best = expected.double().log_softmax(-1).topk(2, -1)
    is_flip = of_format.argmax(-1) != best.indices[:, 0]
    return (is_flip & (best.values[:, 0] - best.values[:, 1] > DEFECT_MARGIN)).nonzero().flatten().tolist()


def test_a_cache_of_8_bits_stays_within_its_limit_and_is_what_its_definition_says(texts, reference):
    computed = compute(texts, flags_of(KV_FORMAT)).logits
    found = distance(texts, reference, computed)
    assert found.perplexity_ratio - 1 <= 2 * KV_LIMIT  # of one window
    own = [rounding.logits_of(rounding.with_eight_bit_keys(demo.TARGET), window) for window in texts.windows]
    # A key near the middle of two numbers may round to the other one.
    assert distance(texts, own, computed).mean_divergence < 0.2 * found.mean_divergence


@pytest.mark.parametrize("name", [pytest.param("int8-g64", marks=pytest.mark.full), "int4-g128+embedding"])
def test_an_engine_computes_what_the_definition_of_a_format_says(name, texts, reference):
    """The second implementation shares no code with the engine's."""
    assert own_rounding(name, texts, compute(texts, flags_of(name)).logits) < 1e-9
    assert own_rounding(name, texts, reference) > 1e-5
