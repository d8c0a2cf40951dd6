"""What benchmarks print and keep: kernel names, groups, ratios, files."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as listed
from benchmarks import ablate, profile, saved

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gemv_kernel", "gemv_kernel"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "nvjet_tst_128x8_64x12_4x1_v_bz_TNT"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<long>, std::array<char*, 3ul> >(int)",
            "vectorized_elementwise_kernel CUDAFunctor_add",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::FillFunctor<int>>(x)>(int)",
            "elementwise_kernel FillFunctor",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)", "Kernel2 cutlass_80_wmma_tensorop_bf16"),
    ],
)
def test_kernels_have_short_names(name: str, short: str) -> None:
    assert profile.short_name(name) == short


def test_every_kernel_of_ours_has_a_group() -> None:
    sources = [path.read_text() for path in (ROOT / "photon_grpc" / "kernels").rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert len(kernels) > 8
    assert {name for name in kernels if profile.group_of(name) == "other"} == set()


def test_the_trace_says_what_ran_on_the_device(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "void a<1>(int)", "dur": 2.0},
        {"cat": "kernel", "name": "void a<2>(int)", "dur": 3.5},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 9},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 100},
        {"name": "metadata", "ph": "M"},
    ]
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert profile.device_rows(trace) == [("Memcpy HtoD", 1, 9.0), ("a", 2, 5.5)]


def test_a_ratio_is_what_the_feature_gains_whichever_way_the_figure_counts() -> None:
    assert ablate.cell("decode 1, ms", 3.0, 2.0) == "3.000 (1.50×)"
    assert ablate.cell("mixed-512, tok/s", 20_000.0, 40_000.0) == "20,000 (2.00×)"
    assert ablate.cell("decode 1, ms", 2.0, 2.0) == "2.000"
    assert ablate.cell("decode 1, ms", None, 2.0) == "–"


def test_rows_with_flags_of_other_versions_are_left_out() -> None:
    assert ablate.known({"a": ["--enforce-eager"], "b": ["--no-such-flag"], "c": ["--async-depth", "0"]}).keys() == {
        "a",
        "c",
    }


@pytest.mark.parametrize("has_gpu", [False, True])
def test_rows_that_change_nothing_here_are_left_out(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    left_out = ablate.VARIANTS.keys() - ablate.known(ablate.VARIANTS).keys()
    assert left_out == (set() if has_gpu else ablate.OF_A_GPU)


def test_what_is_printed_is_kept_with_what_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x.py", "--save", "try"])
    with pytest.raises(RuntimeError), saved.saved("try"):
        print("| 1 | 2 |")
        raise RuntimeError("after a row")
    text = (tmp_path / "try.md").read_text()
    assert capsys.readouterr().out.strip() in text
    for part in ("# try\n", "--save try`, 20", "cores, Python 3.", "torch ", "| 1 | 2 |"):
        assert part in text
    with saved.saved(None):
        print("only shown")
    assert list(tmp_path.iterdir()) == [tmp_path / "try.md"]


def test_everything_that_can_be_measured_is_listed() -> None:
    names = [name for name, _ in listed.listing()]
    assert all(meaning for _, meaning in listed.listing())
    commands = [path for path in (ROOT / "benchmarks").glob("[a-z]*.py") if "__name__ ==" in path.read_text()]
    assert {f"benchmarks.{path.stem}" for path in commands} | {"benchmarks.kernels"} == set(names)
    assert {module for module, *_ in listed.SHORT} <= set(names)
