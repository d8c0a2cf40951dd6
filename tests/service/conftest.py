"""What tests of processes leave as it was: where this process logs to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Else a handler writes to its descriptor when that is closed, and its number a socket's."""
    loggers = [logging.getLogger(name) for name in ("", "bare")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
