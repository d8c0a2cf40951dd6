"""Pages of the whole service, such as /metrics, wherever they are served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from photon_grpc.errors import frames_of

_LOG = logging.getLogger(__name__)


class Page(NamedTuple):
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK


#: Makes a page for the value of the header `accept`.
Render = Callable[[str], Page]


def render(pages: Mapping[str, Render], path: str, accept: str) -> Page:
    """Return the page at the path; one that says so if there is none, or if it cannot be made."""
    page = pages.get(path)
    if page is None:
        return text_page(HTTPStatus.NOT_FOUND, f"the pages are {', '.join(pages)}")
    try:
        return page(accept)
    except Exception as error:
        _LOG.error("%s cannot be shown, %s\n%s", path, type(error).__name__, frames_of(error))
        return text_page(HTTPStatus.INTERNAL_SERVER_ERROR, "the log has the reason")


def text_page(status: HTTPStatus, text: str) -> Page:
    return Page(f"{text}\n".encode(), status=status)
