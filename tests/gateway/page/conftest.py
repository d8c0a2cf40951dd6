"""A headless Chromium, and a page in it that tells what went wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = os.environ.get("PHOTON_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        pytest.skip("no Chromium: set PHOTON_CHROMIUM, or have chromium on PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright, which drives Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Watched:
    """A tab, the address that it shows, and what must not happen in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.told: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: self.told.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.told.append(f"error: {error}"))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    @contextlib.contextmanager
    def at(self, url: str) -> Iterator[Any]:
        """Close the tab before its server goes."""
        self.page.goto(url)
        try:
            yield self.page
        finally:
            self.page.close()

    def check(self) -> None:
        """A refused call is told by the browser itself; everything else is a fault of the page."""
        assert [each for each in self.told if "status of 4" not in each] == []
        assert len(self.hosts) == 1


@pytest.fixture
def tab(chromium: Any) -> Iterator[Watched]:
    """Fail where the page breaks its policy, logs anything or calls another host."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="no-preference")
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    watched.check()
