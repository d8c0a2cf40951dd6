"""One victim for all attacks, the form that was asked for, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.figures import Figures
from tests.attack.size import LONG, SIZES, Size
from tests.attack.victim import Victim, service_set, victim

#: Of one attack in the long form; the short one has what every test has.
_LONG_LIMIT_S = 900
_FIGURES = pytest.StashKey[Figures]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = Figures()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only the long form has; gives that form the time it takes."""
    is_long = config.getoption("--attack") == LONG.name
    here = str(Path(__file__).parent) + os.sep
    attacks = [item for item in items if str(item.path).startswith(here)]
    left_out = [item for item in attacks if not is_long and item.get_closest_marker("long_attack")]
    for item in attacks:
        item.add_marker(pytest.mark.timeout(_LONG_LIMIT_S) if is_long else pytest.mark.slow)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash[_FIGURES]
    if config.getoption("--attack") == LONG.name and figures.rows:
        terminalreporter.section("attacks")
        terminalreporter.write(figures.markdown())
    if (path := config.getoption("--attack-figures")) is not None:
        figures.write(path)


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> Size:
    return SIZES[request.config.getoption("--attack")]


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[_FIGURES]


@pytest.fixture(scope="session")
def attacked(size: Size, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Every attack leaves it as it found it. It answers a service of an operator's own, too."""
    own = service_set(tmp_path_factory.mktemp("own"))
    with victim("--model", size.model, "--metrics-listen", "127.0.0.1:0", "--service", own) as running:
        yield running
        running.owns_nothing()
