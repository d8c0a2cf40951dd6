"""GET /engine/events and the page: who may look, and until when."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from photon_grpc.access.key_ring import KeyRing
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.stats import Load
from tests.frontend.fake_engine import FACTS, frontend
from tests.gateway.in_memory import in_memory
from tests.server.keys import SECRETS, write_keys

PICTURE = EnginePicture(1.0, (), 0, (), Load())


async def test_a_viewer_gets_pictures_until_the_server_drains() -> None:
    with frontend() as (served, link):
        server = in_memory(served)
        call = asyncio.create_task(server.client.get("/engine/events"))
        await asyncio.wait_for(link.came.wait(), 120)
        link.on_frame(PICTURE)
        await asyncio.sleep(0.01)
        await served.drain(0)
        answer = await asyncio.wait_for(call, 120)
        assert answer.headers["content-type"].startswith("text/event-stream")
        first, second, _ = answer.text.split("\n\n")
        assert first.startswith(":") and json.loads(second.removeprefix("data: "))["num_slots"] == FACTS.max_num_seqs
        assert (await server.client.get("/engine/events")).json()["error"]["code"] == "DRAINING"


async def test_a_viewer_needs_the_scope_of_operators(tmp_path: Path) -> None:
    ring = KeyRing(str(write_keys(tmp_path / "keys.toml")))
    with frontend() as (served, _):
        server = in_memory(served, keys=ring)
        for name in ("gen", "mod"):
            headers = {"authorization": f"Bearer {SECRETS[name]}"}
            assert (await server.client.get("/engine/events", headers=headers)).status_code == 403
        assert (await server.client.get("/")).status_code == 200  # the page itself holds nothing secret
