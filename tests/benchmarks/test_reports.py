"""What benchmarks print and keep: kernel names, groups, ratios, files."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as listed
from benchmarks import ablate, compare, offline, profile, saved, workloads
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import timing

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


def git(root: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", "-C", str(root), *named, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_is_kept_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(saved, "RESULTS", results)
    assert saved.commit() == ""
    git(tmp_path, "init")
    assert saved.commit() == ""
    (tmp_path / "code.py").write_text("x = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "A change")
    named = f"commit {git(tmp_path, 'rev-parse', '--short', 'HEAD')}"
    with saved.saved("try"):
        # The code that runs was read before.
        (tmp_path / "code.py").write_text("x = 2")
    assert re.search(rf"^`python .*`, [\d-]+, {named}$", (results / "try.md").read_text(), re.MULTILINE)
    assert saved.commit() == f"{named} with uncommitted changes"
    git(tmp_path, "checkout", "code.py")
    # A table that was written is no change.
    assert saved.commit() == named
    inner = tmp_path / "unpacked" / "benchmarks" / "results"
    inner.mkdir(parents=True)
    monkeypatch.setattr(saved, "RESULTS", inner)
    assert saved.commit() == ""


class FakeWork:
    """Of half a second, whatever is asked."""

    num_tokens = 1

    def run(self, prompts: list[tuple[int, ...]], counts: list[int], share: bool = False) -> float:
        return 0.5


def test_every_workload_without_the_wire_is_a_row_of_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline, "loaded", lambda shape, flags: contextlib.nullcontext(FakeWork()))
    monkeypatch.setattr(offline, "floor_ms", lambda *_: None)
    monkeypatch.setattr(offline.workloads, "prompt", lambda *_: (1,))
    monkeypatch.setattr(offline.workloads, "shared_prefix", lambda *_: [(1,)])
    monkeypatch.setattr(sys, "argv", ["offline", "--batch", "8"])
    offline.main()
    out = capsys.readouterr().out
    shown = {(name[1], name[2]): figure.value for name, figure, _ in compare.compared(out, out)}
    assert shown["8", "tok/s"] == 8 * 256 / 0.5
    assert shown["prefill 32 × 2048, prompt tok/s", "ours"] == 32 * 2048 / 0.5
    for length in ("2,048", "128"):
        assert shown[f"first token after {length} prompt tokens, ms", "ours"] == 500
    tokens = sum(num_out for _, num_out in workloads.mixed_512())
    assert shown["mixed-512, output tok/s", "ours"] == pytest.approx(tokens / 0.5)
    assert shown["shared prefix 256 × (1024 + 64), 64 out, caching on, s", "ours / vLLM"] == 1.0


@pytest.mark.parametrize(
    "module",
    [
        "fused_step",
        "layer_chains",
        "sweep --out x.json",
        "chain_sweep --out x.json",
        "layer_sweep --out x.json",
        "products8",
        "many_rows",
        "packed_sweep --out x.json",
        "format_chains",
        "__main__ fused_linear",
    ],
)
def test_what_needs_a_gpu_says_so_in_one_line(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    name, *flags = module.split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU of .*$") as ended:
        importlib.import_module(f"benchmarks.kernels.{name}").main()
    # Which Python prints, with exit code 1.
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_kernels_are_reported_in_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("swiglu", "logprobs"):
        monkeypatch.setattr(f"benchmarks.kernels.{name}.measure_us", lambda *_: 12.5)
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", "swiglu", "logprobs"])
    kernels.main()
    swiglu, logprobs = compare.tables(capsys.readouterr().out)
    assert (swiglu.heading, logprobs.heading) == ("swiglu", "logprobs")
    for table in (swiglu, logprobs):
        assert table.columns[:2] == ("case", "µs") and len(table.rows) >= 4
        assert {row[1] for row in table.rows} == {"12.50"}
        assert compare.num_names(table) == 1


def test_a_kernel_is_set_against_the_larger_of_its_floors_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    num_bytes, flops = 5e-6 * timing.BYTES_PER_SECOND, 8e-6 * timing.FLOPS_PER_SECOND
    timing.report("a", 10.0, num_bytes, torch.device("cuda"))
    timing.report("b", 10.0, num_bytes, torch.device("cuda"), flops)
    timing.report("c", 10.0, num_bytes, torch.device("cuda"), bytes_per_second=2 * timing.BYTES_PER_SECOND)
    assert capsys.readouterr().out.splitlines() == [
        "| a | 10.00 | 5.00 | 50.0 | – |",
        f"| b | 10.00 | 8.00 | 80.0 | {0.8 * timing.FLOPS_PER_SECOND / 1e12:.0f} |",
        "| c | 10.00 | 2.50 | 25.0 | – |",
    ]


def test_everything_that_can_be_measured_is_listed() -> None:
    names = [name for name, _ in listed.listing()]
    assert all(meaning for _, meaning in listed.listing())
    commands = [path for path in (ROOT / "benchmarks").glob("[a-z]*.py") if "__name__ ==" in path.read_text()]
    folders = {f"benchmarks.{name}" for name in ("bits", "kernels", "own_services", "quality")}
    assert {f"benchmarks.{path.stem}" for path in commands} | folders == set(names)
    assert {module for module, *_ in listed.SHORT} <= set(names)
