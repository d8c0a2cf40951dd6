"""What every test relies on: one thread for tensors, no network, no deadline for hypothesis, GPU tests only on GPUs.

Also the order of the files where several run at a time, and the CPU seconds that a run took.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator, Hashable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before torch and tokenizers are imported, and inherited by the processes that tests start. One thread makes
# float32 sums the same on every machine; many threads only cost time on tensors this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings

from tests.each_value import each_value

# How long an example takes says how busy the machine is, not whether the code is right.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("untimed", UNTIMED)
# For `make test`: a quarter of the examples (tests/examples.py scales those that tests name themselves).
QUICK = settings(UNTIMED, max_examples=25)
settings.register_profile("quick", QUICK)
# The same examples every time, for a gate: a change is judged by what it changed. Everybody else's runs search on.
settings.register_profile("same", QUICK, derandomize=True)
settings.load_profile("untimed")

# What begins last must be short, or the others wait for it: first the folders that one process runs as a whole, which
# take minutes and often wait, beside those that compute without a pause; then by how long their longest files take.
LONGEST_FIRST = (
    *("attack", "clients", "kernels", "service", "runner", "parallel", "compose", "server", "models", "properties"),
    *("demo", "cli", "benchmarks", "architecture"),
)
#: Folders whose files share a service: one process runs them all.
SHARING = ("attack", "clients")
_CPU_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tests/attack` takes: options are read before its conftest is."""
    parser.addoption("--attack", choices=("short", "long"), default="short", help="how large the attacks are")
    parser.addoption("--soak", type=float, metavar="SECONDS", help="how long mixed traffic lasts")
    parser.addoption("--attack-figures", type=Path, metavar="PATH", help="write what they did to PATH (.md or .json)")
    parser.addoption("--cpu-budget", type=float, metavar="SECONDS", help="fail if the run takes more CPU time")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected out of garbage collection: it lives as long as the run, and is a million
    objects that each full collection would look through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Before marks choose.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, choose cases of tests marked `each_value`, and skip tests marked `gpu` if there is
    no CUDA device; torch is imported only if there are such tests."""
    mark_all_but_each_value(items)
    items.sort(key=_rank)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def mark_all_but_each_value(items: list[pytest.Item]) -> None:
    """Mark cases of a test marked `each_value` as `full`, but for a few that have each value of every parameter."""
    cases = defaultdict[tuple[Path, str], list[pytest.Function]](list)
    for item in items:
        is_of_many = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if is_of_many and item.get_closest_marker("each_value") and not item.get_closest_marker("full"):
            cases[item.path, item.originalname].append(item)
    for several in cases.values():
        kept = each_value([frozenset(_rows_of(item)) for item in several])
        for number, item in enumerate(several):
            if number not in kept:
                item.add_marker(pytest.mark.full)


def _rows_of(item: pytest.Function) -> Iterator[tuple[str, Hashable]]:
    """Return what each parametrization gives to a case: the names of its parameters, and which values these have."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield ",".join(names), tuple(id(item.callspec.params[name]) for name in names)


def _rank(item: pytest.Item) -> int:
    return _rank_of(item.path)


@cache
def _rank_of(path: Path) -> int:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process of pytest-xdist a file at a time, and those of a folder of SHARING together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in SHARING if file.startswith(f"tests/{folder}/")), file)

    return ByFileOrFolder(config, log)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CPU_S] = 0.0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count what a process of pytest-xdist took."""
    # One that crashed has told nothing.
    node.config.stash[_CPU_S] += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Count what this process took, with the processes that it started and waited for; fail where that is too much."""
    config = session.config
    # Workers of pytest-xdist, which have told what they took, are children, too.
    config.stash[_CPU_S] += sum(os.times()[: 2 if config.stash[_CPU_S] else 4])
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["cpu_s"] = config.stash[_CPU_S]
    elif (budget_s := config.getoption("--cpu-budget")) and config.stash[_CPU_S] > budget_s:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell the CPU time of the run: unlike the time on the clock it does not depend on what else the machine does."""
    took_s, budget_s = config.stash[_CPU_S], config.getoption("--cpu-budget")
    terminalreporter.write_line(f"{took_s:.0f} CPU seconds" + (f" of {budget_s:.0f}" if budget_s else ""))
    if budget_s and took_s > budget_s:
        terminalreporter.write_line("That is too much: --durations=40 shows what takes the time.", red=True)
