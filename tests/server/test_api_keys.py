"""API keys over a real socket: every method of every service, raw paths, reload, owners."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from photon_grpc.access import key_ring
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.config.api_keys import read_api_keys
from photon_grpc.config.flags import ServerConfig
from photon_grpc.config.regular_file import MAX_BYTES
from photon_grpc.errors import ConfigError, QuotaExceeded
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.calls.api_keys import ApiKeys
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.wire import descriptors
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2
from tests.attack import http2
from tests.server.failing import failure, info_of, status_of, trailer
from tests.server.fake_frontend import ASK, GENERATE, STREAM_GENERATE, FakeFrontend, raw, serving, until
from tests.server.keys import ALL, SECRETS, bearer, block, write_keys

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
CHECK = f"/{descriptors.HEALTH}/Check"


def methods_of(*services: object) -> dict[str, str]:
    """Return path -> service of all methods."""
    return {f"/{s.full_name}/{m.name}": s.full_name for s in services for m in s.methods}  # type: ignore[attr-defined]


INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
MODELS = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
#: For the keys of those who generate, too: they ask for features.
GET_MODEL = f"/{MODELS.full_name}/GetModel"
SCOPED = methods_of(INFERENCE, MODELS)
SERVED = [
    *SCOPED,
    *(f"/{service}/ServerReflectionInfo" for service in descriptors.REFLECTION),
    f"/{descriptors.LOAD_REPORTS}/StreamCoreMetrics",
    *(f"/{descriptors.HEALTH}/{name}" for name in ("Check", "Watch", "List")),
]
UNKNOWN = [
    "/photon_grpc.v1.InferenceService/Nothing",
    "/photon_grpc.admin.v1.AdminService/Drain",
    "/photon_grpc.v1.AdminService/Drain",
    "/photon_grpc.v1.Nothing/Generate",
    "/Generate",
    "/",
    "//",
    "/photon_grpc.v1.InferenceService//Generate",
    "/x/photon_grpc.v1.InferenceService/Generate",
    "/photon_grpc.v1.InferenceService/Generate/",
    "/photon_grpc.v1.InferenceService/generate",
    "/grpc.health.v1.Health/Nothing",
    "/%70hoton_grpc.v1.InferenceService/Generate",
]


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(str(write_keys(tmp_path / "keys.toml")))


@pytest.fixture
def exempt() -> tuple[str, ...]:
    return ("none",)


@pytest.fixture
async def address(frontend: FakeFrontend, ring: KeyRing, exempt: tuple[str, ...]) -> AsyncIterator[str]:
    async with serving(frontend, rules=CallRules(FailureLog(), keys=ApiKeys(ring, exempt))) as bound:
        yield bound


@pytest.mark.parametrize("method", [*SERVED, *UNKNOWN])
async def test_no_method_answers_without_a_known_key(
    channel: grpc.aio.Channel, frontend: FakeFrontend, method: str
) -> None:
    digest = "0" * 64
    for sent, reason in [
        ((), "MISSING_CREDENTIALS"),
        (bearer("guess"), "INVALID_CREDENTIALS"),
        (bearer(""), "INVALID_CREDENTIALS"),
        (bearer(ALL[:-1]), "INVALID_CREDENTIALS"),
        (bearer(digest), "INVALID_CREDENTIALS"),
        ((("authorization", ALL),), "INVALID_CREDENTIALS"),
        ((("authorization", f"Basic {ALL}"),), "INVALID_CREDENTIALS"),
        ((*bearer(ALL), *bearer("guess")), "INVALID_CREDENTIALS"),
        ((*bearer("guess"), *bearer(ALL)), "INVALID_CREDENTIALS"),
    ]:
        error = await failure(raw(channel, method)(b"", metadata=sent))
        assert (error.code(), info_of(error).reason) == (UNAUTHENTICATED, reason)
        assert trailer(error, "x-request-id")
        assert "guess" not in str(status_of(error)) and ALL not in str(status_of(error))
    assert not frontend.asks


async def test_paths_that_are_not_served_are_one_kind_in_the_log(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller without a key can neither choose what is logged nor evade the limit of lines."""
    caplog.set_level(logging.INFO, "photon_grpc.observe")
    for number in range(30):
        await failure(raw(channel, f"/{number}{'x' * 6000}")(b""))
    assert [json.loads(line)["method"] for line in caplog.messages] == ["unknown"] * 10


@pytest.mark.parametrize("method", SERVED)
async def test_a_method_that_is_served_is_named_in_the_log(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    caplog.set_level(logging.INFO, "photon_grpc.observe")
    await failure(raw(channel, method)(b""))
    (line,) = caplog.messages
    assert json.loads(line)["method"] == method


@pytest.mark.parametrize("method", SCOPED)
async def test_a_key_without_the_scope_is_denied(channel: grpc.aio.Channel, method: str) -> None:
    lacking = "mod" if SCOPED[method] == INFERENCE.full_name else "gen"
    for name in ("adm",) if method == GET_MODEL else (lacking, "adm"):
        error = await failure(raw(channel, method)(b"", metadata=bearer(SECRETS[name])))
        assert (error.code(), info_of(error).reason) == (DENIED, "SCOPE_REQUIRED")


async def test_who_generates_may_read_the_model(channel: grpc.aio.Channel) -> None:
    for name in ("gen", "mod"):
        await raw(channel, GET_MODEL)(b"", metadata=bearer(SECRETS[name]))


@pytest.mark.parametrize("name", ["gen", "all"])
async def test_a_key_with_the_scope_is_admitted(channel: grpc.aio.Channel, frontend: FakeFrontend, name: str) -> None:
    sent = bearer(SECRETS[name])
    await raw(channel, GENERATE)(ASK.SerializeToString(), metadata=sent)
    [_ async for _ in raw(channel, STREAM_GENERATE, stream=True)(ASK.SerializeToString(), metadata=sent)]
    assert [ask.origin.owner for ask in frontend.asks] == [name, name]


async def test_every_request_of_a_shared_stream_has_the_owner_of_its_call(
    channel: grpc.aio.Channel, frontend: FakeFrontend
) -> None:
    call = inference_pb2_grpc.InferenceServiceStub(channel).MultiplexGenerate(metadata=bearer(SECRETS["gen"]))
    for request_id in ("a", "b"):
        request = inference_pb2.GenerateRequest(text="hi", request_id=request_id)
        await call.write(inference_pb2.MultiplexGenerateRequest(generate=request))
    await until(lambda: len(frontend.asks) == 2)
    call.cancel()
    assert [(ask.origin.request_id, ask.origin.owner) for ask in frontend.asks] == [("a", "gen"), ("b", "gen")]


async def test_the_scheme_is_read_in_any_case(channel: grpc.aio.Channel, frontend: FakeFrontend) -> None:
    await raw(channel, GENERATE)(ASK.SerializeToString(), metadata=(("authorization", f"bearer  {ALL}"),))
    assert len(frontend.asks) == 1


@pytest.mark.parametrize("method", UNKNOWN)
async def test_with_a_key_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel, method: str) -> None:
    error = await failure(raw(channel, method)(b"", metadata=bearer(SECRETS["gen"])))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("path", ["photon_grpc.v1.InferenceService/Generate", "", "*", "Generate", GENERATE + "\0"])
async def test_a_malformed_path_reaches_no_method(frontend: FakeFrontend, address: str, path: str) -> None:
    def is_answered(**headers: str) -> bool:
        with http2.connected(address, 10.0) as connection:
            connection.call(1, path, http2.grpc_message(ASK.SerializeToString()), **headers)
            return connection.is_answered(1)

    assert await asyncio.to_thread(is_answered)
    assert await asyncio.to_thread(is_answered, authorization=f"Bearer {ALL}")
    assert not frontend.asks


async def test_a_refused_call_need_not_send_its_message(channel: grpc.aio.Channel) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    error = await failure(channel.stream_unary(GENERATE)(never()))
    assert info_of(error).reason == "MISSING_CREDENTIALS"


@pytest.mark.parametrize("exempt", [("health",), ("health", "reflection")])
async def test_exempt_services_need_no_key_and_others_do(channel: grpc.aio.Channel, exempt: tuple[str, ...]) -> None:
    checked = await raw(channel, CHECK)(b"")
    assert health_pb2.HealthCheckResponse.FromString(checked).status == health_pb2.HealthCheckResponse.SERVING
    await raw(channel, CHECK)(b"", metadata=bearer("guess"))
    call = channel.stream_stream(f"/{descriptors.REFLECTION[0]}/ServerReflectionInfo")(iter([b"\x3a\x01*"]))
    if "reflection" in exempt:
        assert [answer async for answer in call]
    else:
        assert info_of(await failure(call)).reason == "MISSING_CREDENTIALS"
    assert info_of(await failure(raw(channel, GENERATE)(b""))).reason == "MISSING_CREDENTIALS"


@pytest.mark.parametrize(
    ("wait_s", "is_final", "pushback", "retry_s"),
    [(2.5, False, "2500", 2.5), (2.5, True, "-1", 2.5), (None, True, "-1", None)],
)
async def test_an_exceeded_quota_gives_a_retry_delay(
    channel: grpc.aio.Channel,
    frontend: FakeFrontend,
    wait_s: float | None,
    is_final: bool,
    pushback: str,
    retry_s: float | None,
) -> None:
    refusal = QuotaExceeded("too much", needed=3, limit=2, retry_after_s=wait_s)
    refusal.is_final = is_final
    frontend.refusals.append(refusal)
    error = await failure(raw(channel, GENERATE)(ASK.SerializeToString(), metadata=bearer(ALL)))
    assert (error.code(), info_of(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert dict(info_of(error).metadata) == {"needed": "3", "limit": "2"}
    assert trailer(error, "grpc-retry-pushback-ms") == pushback
    retry = error_details_pb2.RetryInfo()
    delays_s = [
        retry.retry_delay.ToTimedelta().total_seconds() for each in status_of(error).details if each.Unpack(retry)
    ]
    assert delays_s == ([] if retry_s is None else [retry_s])


def test_health_alone_is_exempt_by_default() -> None:
    assert ServerConfig().api_keys_exempt == ("health",)


def test_every_digest_is_compared_even_after_a_match(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first, a last and no match take equal work, with each comparison in constant time."""
    counts = []
    for secret in ("secret-of-all", "secret-of-adm", "guess"):
        compared = []
        monkeypatch.setattr(key_ring.hmac, "compare_digest", lambda a, b, to=compared: to.append(a) or _COMPARE(a, b))
        ring.find(secret)
        counts.append(len(compared))
    assert counts == [len(SECRETS)] * 3


_COMPARE = hmac.compare_digest


async def test_a_changed_file_is_in_force_without_a_restart(
    channel: grpc.aio.Channel, ring: KeyRing, tmp_path: Path
) -> None:
    write_keys(tmp_path / "new.toml", block("later", "secret-of-later")).rename(tmp_path / "keys.toml")
    ring.look()
    await raw(channel, GENERATE)(ASK.SerializeToString(), metadata=bearer("secret-of-later"))
    error = await failure(raw(channel, GENERATE)(b"", metadata=bearer(ALL)))
    assert info_of(error).reason == "INVALID_CREDENTIALS"


@pytest.mark.parametrize("content", ["", "[[key]", block("x", "y", ["everything"]), None])
async def test_a_broken_file_keeps_the_old_keys_and_is_logged(
    channel: grpc.aio.Channel, ring: KeyRing, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "keys.toml"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with caplog.at_level(logging.INFO):
        ring.look()
        ring.look()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "stay in force" in record.message and str(path) in record.message
    await raw(channel, GENERATE)(ASK.SerializeToString(), metadata=bearer(ALL))


def test_a_pipe_in_place_of_the_file_does_not_block_the_server(ring: KeyRing, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.unlink()
    os.mkfifo(path)
    ring.look()
    assert ring.find(ALL) is not None
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_api_keys(str(path))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG):
        yield caplog


async def test_no_key_is_logged(channel: grpc.aio.Channel, logged: pytest.LogCaptureFixture) -> None:
    for secret in (ALL, "guess", SECRETS["mod"]):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await raw(channel, GENERATE)(b"", metadata=bearer(secret))
        assert secret not in logged.text
    assert "INVALID_CREDENTIALS" in logged.text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("", "key"),
        ("key = 3", "key"),
        ("[[key]]\nname = 'a'", "sha256"),
        (block("a b", "x"), "key[0].name"),
        (block("a\n", "x"), "key[0].name"),
        (block("a", "x") + "admin = true\n", "admin"),
        (block("a", "x", ["generate", "root"]), "key[0].scopes[1]"),
        (block("a", "x", []), "scopes"),
        (block("a", "x", max_concurrent=0), "max_concurrent"),
        (block("a", "x", tokens_per_minute=1.5), "tokens_per_minute"),
        (block("a", "x") + block("a", "y"), "2 keys have the name"),
        (block("a", "x") + block("b", "x"), "2 keys have the sha256"),
        ("#" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(str(path))
    assert problem in str(caught.value) and str(path) in str(caught.value)
