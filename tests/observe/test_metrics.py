"""The counts of calls and requests, and the page that shows them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from photon_grpc.compose.observation import observation
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.ask import Origin
from photon_grpc.core.counts import Counts, Sums
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.core.stats import Load
from photon_grpc.errors import PhotonError, QueueFull, RequestError, Unavailable
from photon_grpc.frontend.record import RequestRecord
from photon_grpc.observe import metrics
from photon_grpc.observe.exposition import Snapshot
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.observe.metrics import CallMetrics, KeyMetrics, RequestMetrics
from photon_grpc.observe.request_log import LOGGER, RequestLog
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.guard import CallRules, Guard
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import FACTS
from tests.server.fake_frontend import ASK, FakeFrontend, for_ever, raw, serving, until

SERVICE = "photon_grpc.v1.InferenceService"
RECORD = RequestRecord(
    Origin(100.0, "r-1", "team", "StreamGenerate", "demo", None, f"00-{'a' * 32}-{'b' * 16}-01"),
    reason="",
    end_time_s=1_700_000_000.25,
    total_s=3.0,
    finish_reasons=(FinishReason.EOS, FinishReason.MAX_TOKENS),
    usage=Usage(7, 4, 9),
    longest_output_tokens=5,
    num_preemptions=2,
    queue_s=0.25,
    first_token_s=0.75,
    last_token_s=2.75,
)
REFUSED = RequestRecord(Origin(100.0), "QUEUE_FULL", 1_700_000_000.0, 0.001)


def samples(counts: Counts, accept: str = "") -> dict[tuple[str, ...], float]:
    """Return (name, label values by label name ...) -> value of all series that are not zero."""
    sums = Sums()
    sums.update(0, counts.changed())
    page, _ = Snapshot(Load(), sums, True).page(accept)
    parse = parse_openmetrics if "openmetrics" in accept else parse_text
    return {
        (sample.name, *[sample.labels[label] for label in sorted(sample.labels)]): sample.value
        for family in parse(page.decode())
        for sample in family.samples
        if sample.value
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0", "text/plain;version=0.0.4"])
def test_an_answered_request(accept: str) -> None:
    counts = Counts()
    RequestMetrics(counts).ended(RECORD)
    found = samples(counts, accept)
    assert found["photon_request_success_total", "eos"] == 1
    assert found["photon_request_success_total", "max_tokens"] == 1
    sums = {name[0].removesuffix("_sum"): value for name, value in found.items() if name[0].endswith("_sum")}
    assert sums == {
        "photon_request_queue_time_seconds": 0.25,
        "photon_request_prefill_time_seconds": 0.5,
        "photon_time_to_first_token_seconds": 0.75,
        "photon_request_decode_time_seconds": 2.0,
        "photon_request_time_per_output_token_seconds": 0.5,
        "photon_e2e_request_latency_seconds": 3.0,
        "photon_request_prompt_tokens": 7,
        "photon_request_generation_tokens": 9,
    }
    assert found["photon_request_time_per_output_token_seconds_bucket", "0.5"] == 1
    assert ("photon_request_time_per_output_token_seconds_bucket", "0.4") not in found


@pytest.mark.parametrize(
    ("reason", "output_tokens", "name"),
    [
        ("QUEUE_FULL", 0, ("photon_requests_rejected_total", "QUEUE_FULL")),
        ("ENGINE_FAILURE", 3, ("photon_requests_failed_total", "ENGINE_FAILURE")),
        ("CANCELLED", 0, ("photon_requests_cancelled_total",)),
        ("CANCELLED", 3, ("photon_requests_cancelled_total",)),
    ],
)
def test_a_request_that_is_not_answered_counts_once(reason: str, output_tokens: int, name: tuple[str, ...]) -> None:
    counts = Counts()
    usage = Usage(7, 0, output_tokens)
    RequestMetrics(counts).ended(RequestRecord(RECORD.origin, reason, 0.0, 1.0, (FinishReason.EOS,), usage))
    found = samples(counts)
    assert found[name] == 1
    assert not any(each[0] == "photon_request_success_total" for each in found)


def test_the_metrics_page_describes_the_engine_and_the_build() -> None:
    load = Load(running=3, queued=2, total_blocks=8, owned_blocks=2, free_blocks=6, prompt_tokens=9, overrun_tokens=4)
    load = msgspec.structs.replace(load, cached_prompt_tokens=7, session_cached_prompt_tokens=5)
    page, content_type = Snapshot(load, Sums(), False, FACTS, 'a "model"', 2, 1, 0).page("")
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in parse_text(page.decode())}
    assert all(family.documentation for family in families.values())
    assert all(name.startswith(("photon_", "grpc_server_", "http_request")) for name in families)
    value = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert (value["photon_num_requests_running"], value["photon_num_requests_waiting"]) == (3, 2)
    assert (value["photon_kv_cache_usage_perc"], value["photon_ready"]) == (0.25, 0)
    assert value["photon_prompt_tokens"] == value["photon_prefix_cache_queries"] == 9
    assert value["photon_overrun_tokens"] == 4
    assert (value["photon_prefix_cache_hits"], value["photon_prefix_cache_session_hits"]) == (7, 5)
    assert families["photon_build_info"].samples[0].labels["model_name"] == 'a "model"'
    assert [sample.value for sample in families["photon_restarts"].samples] == [1, 0]


@pytest.mark.parametrize("accept", ["text/plain;version=x", "application/openmetrics-text;version=,;;=", "\x00", "*/*"])
def test_a_scraper_with_an_invalid_accept_header_gets_the_page(accept: str) -> None:
    page, _ = Snapshot(Load(), Sums(), True).page(accept)
    assert b"photon_num_requests_running 0.0" in page


async def test_calls_are_counted_by_method_and_status() -> None:
    frontend, counts = FakeFrontend(), Counts()
    async with (
        serving(frontend, rules=CallRules(FailureLog(), counts=CallMetrics(counts))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(ASK)
        async for _ in stub.StreamGenerate(ASK):
            pass
        frontend.refusals = [QueueFull("full"), RuntimeError("a defect")]
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(ASK)
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(channel, f"/{SERVICE}/Generate")(b"\xff\xff")
        frontend.script = (for_ever,)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(ASK, timeout=0.5)
        call = stub.StreamGenerate(ASK)
        await until(lambda: len(frontend.streams) == 4)
        call.cancel()
        await until(lambda: all(stream.closed.is_set() for stream in frontend.streams))
        await asyncio.sleep(0)
    found = samples(counts)
    handled = {name[1:]: value for name, value in found.items() if name[0] == "grpc_server_handled_total"}
    unary, streamed = ("Generate", SERVICE, "unary"), ("StreamGenerate", SERVICE, "server_stream")
    assert handled == {
        ("OK", *unary): 1,
        ("RESOURCE_EXHAUSTED", *unary): 1,
        ("INTERNAL", *unary): 1,
        ("INVALID_ARGUMENT", *unary): 1,
        ("DEADLINE_EXCEEDED", *unary): 1,
        ("OK", *streamed): 1,
        ("CANCELLED", *streamed): 1,
    }
    assert found["grpc_server_started_total", *unary] == 5
    assert found["grpc_server_started_total", *streamed] == 2
    assert found["grpc_server_handling_seconds_count", *unary] == 5


async def test_unknown_paths_share_one_label() -> None:
    counts = Counts()
    async with (
        serving(FakeFrontend(), rules=CallRules(FailureLog(), counts=CallMetrics(counts))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for path in ("/a/b", f"/{SERVICE}/Nope", f"/{SERVICE}", "//", f"/{SERVICE}/Generate/", "/x.Y/Z"):
            with pytest.raises(grpc.aio.AioRpcError):
                await raw(channel, path)(b"")
    interceptor = Guard(CallRules(FailureLog(), counts=CallMetrics(counts)))

    async def nothing(details: Any) -> None:
        return None

    class Details:
        invocation_metadata = ()

    for number in range(10_000):
        details = Details()
        details.method = f"/made.Up{number}/Call"  # type: ignore[attr-defined]
        assert await interceptor.intercept_service(nothing, details) is None  # type: ignore[arg-type]
    unknown = ("unknown",) * 3
    found = samples(counts)
    assert found["grpc_server_started_total", *unknown] == 10_006
    assert found["grpc_server_handled_total", "UNIMPLEMENTED", *unknown] == 10_006
    assert {name[1:] for name in found if name[0] == "grpc_server_started_total"} == {unknown}


def test_the_log_line_has_every_field_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for record in (RECORD, REFUSED):
        RequestLog().ended(record)
    answered, refused = map(json.loads, caplog.messages)
    assert answered == {
        "event": "request",
        "time": "2023-11-14T22:13:20.250+00:00",
        "request_id": "r-1",
        "api_key": "team",
        "method": "StreamGenerate",
        "model": "demo",
        "labels": {},
        "code": "OK",
        "reason": "",
        "field": "",
        "finish_reasons": ["eos", "max_tokens"],
        "prompt_tokens": 7,
        "cached_prompt_tokens": 4,
        "output_tokens": 9,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "preemptions": 2,
        "queue_ms": 250.0,
        "prefill_ms": 500.0,
        "first_token_ms": 750.0,
        "decode_ms": 2000.0,
        "time_per_output_token_ms": 500.0,
        "total_ms": 3000.0,
        "trace_id": "a" * 32,
    }
    assert (refused["code"], refused["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert refused["queue_ms"] is refused["first_token_ms"] is refused["trace_id"] is None
    assert refused.keys() == answered.keys()


def test_load_reports_on_a_stream_have_labels_of_their_own() -> None:
    service = "xds.service.orca.v3.OpenRcaService"
    assert methods.of(f"/{service}/StreamCoreMetrics").labels == ("server_stream", service, "StreamCoreMetrics")


def test_labels_belong_to_a_fixed_set() -> None:
    """The values are reasons, finish reasons, names in the keys file and in gRPC's descriptors; over HTTP routes,
    methods, statuses and names in the tables of fields.

    Those of request labels are a caller's, and are bounded (test_labels.py).
    """
    names = {label for metric in metrics.COUNTED for label in metric.labels} - {"label", "value", "outcome"}
    grpc = {"grpc_type", "grpc_service", "grpc_method", "grpc_code"}
    assert names == {"finished_reason", "reason", "key"} | grpc | {"handler", "method", "status", "field"}


def test_a_method_from_a_caller_is_no_label() -> None:
    counts = Counts()
    metrics.HttpMetrics(counts).ended("unknown", "BREW", 404, 0.1)
    assert ("unknown", metrics.OTHER, "404") in {series.labels for series in counts.changed()}


@pytest.mark.parametrize("name", ["photon_requests_failed_total", "photon_requests_rejected_total"])
def test_every_reason_begins_at_0(name: str) -> None:
    """A rate misses the first count of a series that appears later. Reasons that no request has get no series."""
    groups = {"REQUEST_ERROR", "NOT_ALLOWED", "OVERLOADED", "UNAVAILABLE"}
    before_a_request = {"MISSING_CREDENTIALS", "MALFORMED_MESSAGE", "IDLE_STREAM_EVICTED"}
    members = errors_below(RequestError) | errors_below(Unavailable)
    reasons = {cls.reason for cls in members if cls.__module__ == RequestError.__module__}  # no client's
    ends_a_request = reasons - groups - before_a_request - {"CANCELLED"}
    page, _ = Snapshot(Load(), Sums(), True).page("")
    shown = dict(re.findall(rf'^{name}{{reason="(\w+)"}} (\S+)$', page.decode(), re.MULTILINE))
    assert shown == dict.fromkeys(ends_a_request, "0.0")


def errors_below(cls: type[PhotonError]) -> set[type[PhotonError]]:
    return {cls}.union(*(errors_below(child) for child in cls.__subclasses__()))


def test_tokens_are_counted_by_key() -> None:
    counts = Counts()
    observer = KeyMetrics(counts, ("idle", "team"))
    for record in (RECORD, RECORD, REFUSED):
        observer.ended(record)
    sums = Sums()
    sums.update(0, counts.changed())
    page, _ = Snapshot(Load(), sums, True).page("")
    shown = re.findall(r'^photon_(\w+)_tokens_by_key_total{key="(\w+)"} (\S+)$', page.decode(), re.MULTILINE)
    assert sorted(shown) == [
        ("generation", "idle", "0.0"),
        ("generation", "team", "18.0"),
        ("prompt", "idle", "0.0"),
        ("prompt", "team", "14.0"),
    ]


def test_without_keys_nothing_is_counted_by_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "team"\nsha256 = "{"a" * 64}"\nscopes = ["generate"]\n')
    for given, expected in (({}, 1), ({"api_keys_file": str(file)}, 2)):
        observed = observation(ServerConfig(metrics_listen="127.0.0.1:0", **given))
        assert len(observed.observers) == expected
        assert observed.counts is not None
        assert {series.labels for series in observed.counts.changed()} == ({("team",)} if given else set())
