"""Pages of the whole service in a front end: the supervisor makes them, and answers over the control socket."""

from __future__ import annotations

import asyncio
import itertools

from photon_grpc.bridge.control import ControlChannel, PageAnswer, PageWanted
from photon_grpc.errors import Unavailable
from photon_grpc.service.endpoints.pages import Page

#: Pages of /metrics that a front end waits for, each for another header Accept: one costs the supervisor 6 ms. All
#: callers that want the same page wait for it together, so that no other path has more than one.
MAX_WANTED = 4
_METRICS = "/metrics"
TIMEOUT_S = 5.0
#: Longest header Accept that is passed on; scrapers send some 200 characters.
_MAX_ACCEPT_CHARS = 1024


class SupervisorPages:
    """The pages that this front end has asked for, on its event loop."""

    def __init__(self, control: ControlChannel, *, timeout_s: float = TIMEOUT_S) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._keys: dict[int, tuple[str, str]] = {}
        self._coming: dict[tuple[str, str], asyncio.Future[Page]] = {}

    async def page(self, path: str, accept: str) -> Page:
        """Return the page for the header `accept`. Raise Unavailable if the supervisor does not answer in time."""
        page = self._ask((path, accept[:_MAX_ACCEPT_CHARS] if path == _METRICS else ""))
        try:
            # Others may wait for the same page.
            return await asyncio.wait_for(asyncio.shield(page), self._timeout_s)
        except TimeoutError:
            raise _unavailable(f"the supervisor did not answer within {self._timeout_s:g} s") from None

    def answered(self, answer: PageAnswer) -> None:
        """Pass on an answer of the supervisor. Ignore one without a question."""
        key = self._keys.pop(answer.number, None)
        if key is not None and not (page := self._coming.pop(key)).done():
            page.set_result(Page(answer.body, answer.content_type, answer.status))

    def _ask(self, key: tuple[str, str]) -> asyncio.Future[Page]:
        if key in self._coming:
            return self._coming[key]
        num_wanted = sum(path == key[0] for path, _ in self._coming)
        if num_wanted >= MAX_WANTED:
            raise _unavailable(f"{num_wanted} pages of {key[0]} are being made; the limit is {MAX_WANTED}")
        number = next(self._numbers)
        try:
            self._control.send(PageWanted(number, *key))
        except (OSError, BufferError):
            raise _unavailable("the supervisor reads nothing") from None
        self._keys[number] = key
        # It stays until it is answered, so that a supervisor that is late is not asked ever more.
        self._coming[key] = asyncio.get_running_loop().create_future()
        return self._coming[key]


def _unavailable(problem: str) -> Unavailable:
    return Unavailable(f"{problem}; try again", retry_after_s=1.0)
