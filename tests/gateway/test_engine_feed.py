"""The picture of the engine as the page gets it: one line of JSON, and nothing but numbers and the device."""

from __future__ import annotations

import json

from photon_grpc.core.engine_picture import EnginePicture, Lane, Mark, StepWork
from photon_grpc.core.frames import Facts, Watch
from photon_grpc.core.stats import Load
from photon_grpc.gateway.engine_feed import picture_json
from tests.engine.harness import Harness, Setting
from tests.kv_plans import kv_plan

FACTS = Facts(4096, 4096, kv_plan(16), 512, 64, 2048, 1024, 1 << 20, 'a "device"\n', "float32")


def test_every_number_has_its_place() -> None:
    lane = Lane(3, 17, 12, 8, 14, 3, 4, 2, Mark.ADMITTED | Mark.ENDED)
    steps = (StepWork(0.002, 4, 0), StepWork(0.001, 0, 1), StepWork(0.001, 0, 1))
    load = Load(queued=3, owned_blocks=10, cached_blocks=4, limbo_blocks=1, free_blocks=497, output_tokens_per_s=812.04)
    data = picture_json(EnginePicture(12.345, steps, 70, (lane,), load), FACTS)
    assert b"\n" not in data
    assert json.loads(data) == {
        "time_s": 12.345,
        "num_slots": 64,
        "num_blocks": 512,
        "block_size": 16,
        "device": 'a "device"\n',
        "steps": [[0.002, 4, 0], [0.001, 0, 1], [0.001, 0, 1]],
        "num_steps": 70,
        "lanes": [[3, 17, 12, 8, 14, 3, 4, 2, 5]],
        "queued": 3,
        "blocks": {"owned": 10, "cached": 4, "limbo": 1, "free": 497},
        "output_tokens_per_s": 812.0,
        "prompt_tokens_per_s": 0.0,
    }


def test_a_picture_of_an_engine_names_no_request() -> None:
    harness = Harness(Setting())
    harness.post.put(Watch(is_on=True))
    harness.add([71, 72, 73], 5, request_id="secret", owner="someone", session_id="session")
    harness.step()
    (data,) = [picture_json(frame, harness.facts) for _, frame in harness.post.sent if isinstance(frame, EnginePicture)]
    assert not any(word in data for word in (b"secret", b"someone", b"session"))
    shown = json.loads(data)
    assert shown["lanes"] == [[0, 1, 3, 0, 3, 1, 3, 0, Mark.ADMITTED]]
    assert sum(shown["blocks"].values()) == shown["num_blocks"] == 64
