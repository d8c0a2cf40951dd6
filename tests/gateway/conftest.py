"""The loops that a server runs on: uvloop as in a front end, and asyncio's own where uvloop is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("uvicorn")
uvloop = pytest.importorskip("uvloop")

#: Tests of what the loops do differently.
_ON_BOTH = ("test_connection.py", "test_tls.py")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Any] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in _ON_BOTH:
        loops["asyncio"] = asyncio.new_event_loop
    return loops
