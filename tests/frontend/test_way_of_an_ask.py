"""The files that one ask visits between `Frontend.stream` and the Add, which a reader of its path has to open."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import photon_grpc
from photon_grpc.core.ask import StopAsk
from photon_grpc.core.frames import Down
from tests.frontend.fake_engine import FakeLink, ask, done, frontend

ROOT = str(Path(photon_grpc.__file__).parent)
#: The most consecutive visits of files, and of returns to `frontend.py` among them.
MAX_STAYS, MAX_CLIMBS = 24, 1


class Watched(FakeLink):
    """A link that ends the watch when the request is sent."""

    def send(self, frame: Down) -> None:
        sys.setprofile(None)
        super().send(frame)


async def test_one_ask_visits_few_files_and_rarely_comes_back() -> None:
    visited: list[str] = []
    entered: list[FrameType] = []

    def enter(frame: FrameType, event: str, what: object) -> None:
        # A resumed coroutine is not a new visit, and neither is a part of a comprehension.
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and "<" not in frame.f_code.co_name and frame not in entered:
            entered.append(frame)
            visited.append(name)

    with frontend(link=Watched()) as (front, link):
        for watch in (None, enter):  # the first ask makes what is made once
            sys.setprofile(watch)
            try:
                stream = await front.stream(ask((5, 6, 7), stop=StopAsk(max_tokens=4)))
            finally:
                sys.setprofile(None)
            link.step(finished=(done(link.adds[-1].handle),))
            stream.close()
    stays = [name for before, name in zip(["", *visited], visited, strict=False) if name != before]
    assert stays[0].endswith("frontend/frontend.py")
    assert len(stays) <= MAX_STAYS
    assert stays[1:].count(stays[0]) <= MAX_CLIMBS
