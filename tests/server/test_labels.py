"""Labels of a request: their limits, and who sees them."""

from __future__ import annotations

import json
import logging

import grpc
import msgspec
import pytest

from photon_grpc.compose.observation import observation
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.counts import Counts
from photon_grpc.core.generation import Usage
from photon_grpc.observe.metrics import MAX_LABEL_VALUES, LabelMetrics
from photon_grpc.observe.request_log import LOGGER, RequestLog
from photon_grpc.service.logs.log_lines import JsonLines
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import frontend as real_frontend
from tests.observe.test_metrics import RECORD, REFUSED, samples
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import FakeFrontend, serving

TEAM = (("team", "search"), ("zone", "eu"))


def labelled(*labels: tuple[str, str], record=RECORD, **fields):  # type: ignore[no-untyped-def]
    origin = msgspec.structs.replace(record.origin, labels=labels)
    return msgspec.structs.replace(record, origin=origin, **fields)


@pytest.mark.parametrize(
    ("labels", "field", "numbers"),
    [
        ({f"k{number}": "" for number in range(17)}, "labels", ("17", "16")),
        ({"team": "x" * 129}, 'labels["team"]', ("129", "128")),
        ({"": "x"}, 'labels[""]', None),
        ({"Team": "x"}, 'labels["Team"]', None),
        ({"1st": "x"}, 'labels["1st"]', None),
        ({"a-b": "x"}, 'labels["a-b"]', None),
        ({"a\n": "x"}, r'labels["a\n"]', None),
        ({"é": "x"}, r'labels["\u00e9"]', None),
        ({"k" * 64: "x"}, f'labels["{"k" * 64}"]', None),
        ({"k" * 1000: "x"}, f'labels["{"k" * 64}"]', None),
    ],
)
async def test_limits(
    inference: inference_pb2_grpc.InferenceServiceStub,
    labels: dict[str, str],
    field: str,
    numbers: tuple[str, str] | None,
) -> None:
    error = await failure(inference.Generate(pb.GenerateRequest(text="hi", labels=labels)))
    info = info_of(error)
    assert (error.code(), info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert (error.details() or "").startswith(f"{field}: ")
    assert numbers is None or (info.metadata["needed"], info.metadata["limit"]) == numbers


async def test_what_is_within_the_limits_is_taken() -> None:
    front = FakeFrontend()
    widest = {f"k{number:02}" + "_" * 60: "ü" * 128 for number in range(16)}
    async with serving(front) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(text="hi", labels=widest))
        await failure(
            stub.Generate(pb.GenerateRequest(text="hi", labels={"a": "1"}, scheduling={"timeout": {"nanos": -1}}))
        )
    assert dict(front.asks[0].origin.labels) == widest
    # A request that is refused for another field has its labels, too; wrong labels are nowhere.
    ((origin, _),) = front.refused_requests
    assert origin.labels == (("a", "1"),)


async def test_a_wrong_label_reaches_no_observer(
    inference: inference_pb2_grpc.InferenceServiceStub, frontend: FakeFrontend
) -> None:
    await failure(inference.Generate(pb.GenerateRequest(text="hi", labels={"a": "1", "b": "x" * 1000})))
    ((origin, _),) = frontend.refused_requests
    assert origin.labels == ()


async def test_labels_change_nothing_that_the_engine_gets() -> None:
    """So they change neither the output nor the fingerprint in the quarantine nor the prefix cache."""
    front = FakeFrontend()
    async with serving(front) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for labels in ({}, {"team": "search"}):
            request = pb.GenerateRequest(request_id="r", text="hi", labels=labels)
            request.sampling.seed = 5
            await stub.Generate(request)
    with real_frontend() as (real, link):
        for ask in front.asks:
            ask.origin.arrival_s = 1.0
            ask.origin.deadline_s = None
            ask = msgspec.structs.replace(ask, model="")
            stream = await real.stream(ask)
            stream.close()
        first, second = (add.request for add in link.adds)
    assert front.asks[1].origin.labels and first == second


def test_the_request_log_has_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for record in (labelled(*TEAM), labelled(*TEAM, record=REFUSED)):
        RequestLog().ended(record)
    assert [json.loads(line)["labels"] for line in caplog.messages] == [dict(TEAM)] * 2


@pytest.mark.parametrize("letter", ["x", "ü", "😀", "\n"])
def test_a_line_of_the_log_stays_below_4_kib(caplog: pytest.LogCaptureFixture, letter: str) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    widest = [(f"k{number:02}".ljust(63, "_"), letter * 128) for number in range(16)]
    RequestLog().ended(labelled(*widest))
    (text,) = caplog.messages
    whole = JsonLines().format(caplog.records[0])
    assert len(text.encode()) < 4096 and len(whole.encode()) < 4096
    shown = json.loads(whole)["labels"]
    assert json.loads(text)["labels"] == shown
    left_out = shown.pop("…")
    assert shown and shown == dict(widest[: len(shown)]) and left_out == f"{16 - len(shown)} more"


def test_metrics_count_by_the_labels_that_were_named() -> None:
    counts = Counts()
    observer = LabelMetrics(counts, ["team"])
    for record in (
        labelled(*TEAM),
        labelled(*TEAM, reason="CANCELLED"),
        labelled(*TEAM, reason="ENGINE_FAILURE"),
        labelled(*TEAM, reason="QUEUE_FULL", usage=Usage()),
        RECORD,
    ):
        observer.ended(record)
    found = {name: value for name, value in samples(counts).items() if "_by_label_" in name[0]}
    assert found == {
        ("photon_requests_by_label_total", "team", outcome, "search"): 1.0
        for outcome in ("answered", "cancelled", "failed", "rejected")
    } | {("photon_generation_tokens_by_label_total", "team", "search"): 27.0}


def test_values_in_metrics_are_bounded() -> None:
    counts = Counts()
    observer = LabelMetrics(counts, ["team", "zone"])
    for number in range(1000):
        observer.ended(labelled(("team", f"t{number}"), ("zone", "eu")))
    observer.ended(labelled(("team", "t3")))
    found = {key[1:]: value for key, value in samples(counts).items() if key[0] == "photon_requests_by_label_total"}
    assert len(found) == MAX_LABEL_VALUES + 2
    assert found["team", "answered", "other"] == 1000 - MAX_LABEL_VALUES
    assert (found["team", "answered", "t3"], found["zone", "answered", "eu"]) == (2, 1000)


def test_nothing_counts_by_label_unless_one_is_named() -> None:
    def kinds(config: ServerConfig) -> set[type]:
        return set(map(type, observation(config).observers))

    assert LabelMetrics not in kinds(ServerConfig(metrics_listen="127.0.0.1:0"))
    assert LabelMetrics in kinds(ServerConfig(metrics_listen="127.0.0.1:0", metrics_label=("team",)))
