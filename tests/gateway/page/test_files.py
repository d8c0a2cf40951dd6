"""The page's files as they are sent: what its policy forbids is not in them, and no text becomes markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from photon_grpc.gateway.page import FILES, HEADERS

SCRIPTS = {path: content.decode() for path, (content, _) in FILES.items() if path.endswith(".js")}
#: How a text could become markup, a script or a request elsewhere.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|\beval\b|new Function|createContextualFragment"
    r"|DOMParser|srcdoc|javascript:|setAttribute\(\s*[\"'`](?:on|style|src|href)|set(?:Timeout|Interval)\(\s*[\"'`]"
    r"|import\(|localStorage|sessionStorage|indexedDB|document\.cookie|https?://"
)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.inline += data


@pytest.fixture(scope="module")
def elements() -> Elements:
    parser = Elements()
    parser.feed(FILES["/"][0].decode())
    return parser


def test_the_headers_are_those_of_the_contract() -> None:
    assert HEADERS == {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "frame-ancestors 'none'; base-uri 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def test_files_have_their_types() -> None:
    kinds = {path.rpartition(".")[2]: content_type for path, (_, content_type) in FILES.items()}
    assert kinds == {
        "/": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
    }
    assert all(re.fullmatch(r"/|/page/[a-z]+\.(js|css)", path) for path in FILES)


def test_the_page_has_no_inline_script_style_or_handler(elements: Elements) -> None:
    assert elements.inline.strip() == ""
    assert [attrs for tag, attrs in elements.found if tag == "script" and not attrs.get("src")] == []
    assert [
        attrs for _, attrs in elements.found if any(name == "style" or name.startswith("on") for name in attrs)
    ] == []


def test_the_page_names_its_own_files_only(elements: Elements) -> None:
    named = [attrs.get("src") or attrs.get("href") for tag, attrs in elements.found if tag in ("script", "link", "img")]
    assert set(named) <= set(FILES)
    assert "url(" not in FILES["/page/style.css"][0].decode()
    for script in SCRIPTS.values():
        assert {f"/page/{name}" for name in re.findall(r'from "\./(.*)"', script)} <= set(FILES)


def test_every_input_has_a_label(elements: Elements) -> None:
    page = FILES["/"][0].decode()
    wanted = [attrs["id"] for tag, attrs in elements.found if tag in ("input", "select", "textarea")]
    labelled = [name for name in wanted if re.search(rf'for="{name}"|<label[^>]*>[^<]*<\w+[^>]* id="{name}"', page)]
    assert labelled == wanted


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_make_no_markup_and_keep_nothing(path: str) -> None:
    assert UNSAFE.findall(SCRIPTS[path]) == []


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_are_modules_that_parse(path: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    done = subprocess.run([node, "--input-type=module", "--check"], input=SCRIPTS[path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
