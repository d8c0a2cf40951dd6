"""Make docs/page-light.png, docs/page-dark.png and docs/page-phone.png: the page while eight requests run.

python docs/page_picture.py http://127.0.0.1:8000/    of a service, or without an address of the tests' fake one
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HERE = Path(__file__).parent
LIGHT, DARK, PHONE = "page-light.png", "page-dark.png", "page-phone.png"
QUESTION = "Return the largest item of a list."
#: Seconds after the beginning at which some requests have ended and others run.
SHOWN_AFTER_S = {"service": 3.5, "fake": 4.5}


def show_eight_requests(page: Any, url: str, after_s: float) -> None:
    page.goto(url)
    page.get_by_role("button", name="Send", disabled=False).wait_for()
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.locator("#logs .figures", has_text="after").wait_for()
    page.click("#run-many")
    page.wait_for_timeout(after_s * 1000)


def take_pictures(url: str, after_s: float) -> None:
    with sync_playwright() as playwright:
        path = os.environ.get("PHOTON_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, scheme, width, height in ((LIGHT, "light", 1280, 960), (DARK, "dark", 1280, 960)):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            show_eight_requests(page, url, after_s)
            page.screenshot(path=HERE / name)
            page.close()
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="light", device_scale_factor=2)
        show_eight_requests(page, url, after_s)
        page.locator("#many-title").scroll_into_view_if_needed()
        page.evaluate("document.getElementById('many').scrollIntoView()")
        page.screenshot(path=HERE / PHONE)
        browser.close()


@contextlib.contextmanager
def fake_service() -> Any:
    from tests.gateway.page.fake_engine import FakeEngine
    from tests.gateway.page.fake_server import FakeHttpServer, opened

    with opened(FakeHttpServer(engine=FakeEngine(num_slots=8, num_blocks=96))) as url:
        yield url


def main() -> None:
    if len(sys.argv) > 1:
        take_pictures(sys.argv[1], SHOWN_AFTER_S["service"])
        return
    with fake_service() as url:
        take_pictures(url, SHOWN_AFTER_S["fake"])


if __name__ == "__main__":
    main()
