"""The client against the real wire and a scripted server."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from photon_grpc import errors
from photon_grpc.client import Candidate, Client, TokenScore, Unreachable
from photon_grpc.client.admin import AdminClient
from photon_grpc.client.channel import channel_options, is_loopback
from photon_grpc.client.model import read_model
from photon_grpc.client.status import item_error, to_error
from photon_grpc.core.generation import OutputUsage
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import model_pb2

from .fake_server import FakeServer, Refusal, error_info, message, serving

EOS, MAX_TOKENS = pb.FINISH_REASON_EOS, pb.FINISH_REASON_MAX_TOKENS


def loading(pushback_ms: int = 10) -> list[Refusal]:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(pushback_ms)
    trailers = (("grpc-retry-pushback-ms", str(pushback_ms)),)
    details = [error_info("MODEL_LOADING"), retry]
    return [Refusal(grpc.StatusCode.UNAVAILABLE, "the model is loading", details, trailers)]


async def test_a_stream_yields_deltas_and_then_knows_usage_and_timing() -> None:
    script = [message("def ", start=True), message("fib"), message("(n)", finish=MAX_TOKENS)]
    async with serving(FakeServer(script)) as fake, Client(fake.target) as client:
        stream = client.stream("x", max_tokens=3)
        assert stream.start is None
        deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["def ", "fib", "(n)"]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == "MAX_TOKENS"
    assert stream.start is not None
    assert (stream.start.request_id, stream.start.seed) == ("r-1", 7)
    assert stream.usage is not None
    assert stream.usage.output_tokens == 3
    assert stream.timing is not None
    assert stream.timing.first_token_s == 0.012


async def test_several_deltas_in_one_message_are_yielded_one_by_one() -> None:
    both = message("a", start=True)
    both.deltas.add(index=1, text="b")
    async with serving(FakeServer([both, message("", finish=EOS)])) as fake, Client(fake.target) as client:
        texts = [(delta.index, delta.text) async for delta in client.stream("x")]
    assert texts == [(0, "a"), (1, "b"), (0, "")]


async def test_generate_returns_the_whole_result() -> None:
    async with serving(FakeServer([message("all of it", finish=EOS)])) as fake, Client(fake.target) as client:
        result = await client.generate("x", num_outputs=1)
    assert result.text == "all of it"
    assert result.finish.reason == "EOS"
    assert (result.request_id, result.model, result.seed) == ("r-1", "demo", 7)


async def test_what_matched_comes_with_the_finish() -> None:
    ended = message("x")
    ended.deltas[0].finish.reason = pb.FINISH_REASON_STOP_STRING
    ended.deltas[0].finish.stop_string = "\n\n"
    async with serving(FakeServer([ended])) as fake, Client(fake.target) as client:
        finish = (await client.generate("x")).finish
    assert (finish.reason, finish.stop_string, finish.eos_token_id) == ("STOP_STRING", "\n\n", None)


async def test_a_loading_server_is_retried_after_its_pushback() -> None:
    ok = [message("ok", start=True, finish=EOS)]
    async with serving(FakeServer(loading(), loading(), ok)) as fake, Client(fake.target) as client:
        assert "".join([delta.text async for delta in client.stream("x")]) == "ok"
    assert [seen.get("grpc-previous-rpc-attempts") for seen in fake.metadata] == [None, "1", "2"]


async def test_retries_are_bounded_and_the_last_refusal_is_raised() -> None:
    async with serving(FakeServer(loading())) as fake, Client(fake.target, retries=2) as client:
        with pytest.raises(errors.ModelLoading) as raised:
            await client.generate("x")
    assert len(fake.requests) == 3
    assert raised.value.retry_after_s == 0.01


async def test_retries_can_be_turned_off() -> None:
    async with serving(FakeServer(loading())) as fake, Client(fake.target, retries=0) as client:
        with pytest.raises(errors.ModelLoading):
            await client.generate("x")
    assert len(fake.requests) == 1


async def test_without_resume_nothing_is_retried_after_output_began() -> None:
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "the engine died", [error_info("ENGINE_FAILURE")])
    script = [message("some", start=True), lost]
    async with serving(FakeServer(script)) as fake, Client(fake.target, resume=False) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "some"
        with pytest.raises(errors.EngineFailure):
            await anext(stream)
    assert len(fake.requests) == 1


def full(pushback_ms: int) -> Refusal:
    trailers = (("grpc-retry-pushback-ms", str(pushback_ms)),)
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [error_info("QUEUE_FULL")], trailers)


async def test_a_full_queue_is_retried_after_its_delay() -> None:
    ok = [message("ok", finish=EOS)]
    async with serving(FakeServer([full(20)], [full(20)], ok)) as fake, Client(fake.target) as client:
        assert (await client.generate("x")).text == "ok"
    assert len(fake.requests) == 3


async def test_a_full_queue_that_stays_full_is_raised() -> None:
    async with serving(FakeServer([full(15)])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.QueueFull) as raised:
            await client.generate("x")
    assert raised.value.retry_after_s == 0.015
    assert len(fake.requests) == 5


async def test_final_refusals_are_not_retried() -> None:
    async with serving(FakeServer([full(-1)])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.QueueFull) as raised:
            await client.generate("x")
    assert raised.value.retry_after_s is None
    assert len(fake.requests) == 1


async def test_calls_go_to_the_servers_that_are_ready() -> None:
    async with serving(FakeServer()) as one, serving(FakeServer()) as other:
        target = f"ipv4:{one.target},{other.target}"
        async with Client(target) as client:
            while not (one.requests and other.requests):
                await client.generate("x")
            one.ready = False
            seen = -1
            while len(one.requests) != seen:
                seen = len(one.requests)
                for _ in range(4):
                    await client.generate("x")


async def test_without_a_ready_server_models_and_readiness_are_still_answered() -> None:
    fake = FakeServer()
    fake.ready = False
    async with serving(fake), Client(fake.target, retries=0) as client:
        with pytest.raises(Unreachable, match=r"no server at 127\.0\.0\.1:\d+ is ready"):
            await client.generate("x")
        assert (await client.model()).name == "demo"
        assert await client.is_ready() is False


async def test_an_error_keeps_reason_field_and_numbers() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop.max_tokens", description="too many")
    details = [
        error_info("PROMPT_TOO_LONG", needed="5000", limit="4096"),
        error_details_pb2.BadRequest(field_violations=[violation]),
    ]
    refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too long", details)
    async with serving(FakeServer([refusal])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.PromptTooLong, match="too long") as raised:
            await client.generate("x")
    error = raised.value
    assert (error.reason, error.field, error.needed, error.limit) == ("PROMPT_TOO_LONG", "stop.max_tokens", 5000, 4096)
    assert isinstance(error.__cause__, grpc.aio.AioRpcError)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Refusal(grpc.StatusCode.UNIMPLEMENTED), errors.FeatureNotSupported),
        (Refusal(grpc.StatusCode.DEADLINE_EXCEEDED), errors.DeadlinePassed),
        (Refusal(grpc.StatusCode.UNKNOWN), errors.InternalFailure),
        (Refusal(grpc.StatusCode.INTERNAL, details=[error_info("INTERNAL_FAILURE")]), errors.InternalFailure),
        (Refusal(grpc.StatusCode.INTERNAL, details=[error_info("A_REASON_OF_TOMORROW")]), errors.InternalFailure),
        (Refusal(grpc.StatusCode.NOT_FOUND, details=[error_info("QUEUE_FULL", "example.com")]), errors.ModelNotFound),
        (
            Refusal(grpc.StatusCode.INVALID_ARGUMENT, trailers=(("grpc-retry-pushback-ms", "soon"),)),
            errors.InvalidRequest,
        ),
    ],
)
async def test_a_status_without_our_details_is_mapped_by_its_code(
    refusal: Refusal, expected: type[errors.PhotonError]
) -> None:
    async with serving(FakeServer([refusal])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.PhotonError) as raised:
            await client.generate("x")
    assert type(raised.value) is expected


async def test_a_deadline_refused_as_unreachable_is_caught_as_one_that_passed() -> None:
    refusal = Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "too late", [error_info("DEADLINE_UNREACHABLE")])
    async with serving(FakeServer([refusal])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.DeadlinePassed, match="too late") as raised:
            await client.generate("x", timeout=5)
    assert (type(raised.value), raised.value.reason) == (errors.DeadlineUnreachable, "DEADLINE_UNREACHABLE")


async def test_a_failure_known_by_its_group_alone_has_the_reason_of_the_group() -> None:
    """A full proxy answers without details; the clients in Go and Java do the same with it."""
    full = FakeServer([Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)])
    async with serving(full) as fake, Client(fake.target, retries=0) as client:
        with pytest.raises(errors.Overloaded) as raised:
            await client.generate("x")
    assert (type(raised.value), raised.value.reason) == (errors.Overloaded, "OVERLOADED")


async def test_a_reason_of_a_newer_server_is_kept() -> None:
    refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "later", [error_info("A_REASON_OF_TOMORROW")])
    async with serving(FakeServer([refusal])) as fake, Client(fake.target) as client:
        with pytest.raises(errors.Overloaded) as raised:
            await client.generate("x")
    assert raised.value.reason == "A_REASON_OF_TOMORROW"


@pytest.mark.parametrize(
    ("code", "group"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, errors.RequestError),
        (grpc.StatusCode.NOT_FOUND, errors.RequestError),
        (grpc.StatusCode.ABORTED, errors.RequestError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.PERMISSION_DENIED, errors.NotAllowed),
        (grpc.StatusCode.UNAUTHENTICATED, errors.NotAllowed),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlinePassed),
        (grpc.StatusCode.INTERNAL, errors.InternalFailure),
    ],
)
def test_a_newer_reason_keeps_its_facts_and_has_the_class_of_its_status(
    code: grpc.StatusCode, group: type[errors.PhotonError]
) -> None:
    failed = status_pb2.Status(code=code.value[0], message="later")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    for detail in (error_info("A_REASON_OF_TOMORROW", field="stop.x", needed="5", limit="4"), retry):
        failed.details.add().Pack(detail)
    error = item_error(failed, "target")
    assert (type(error), error.reason, str(error)) == (group, "A_REASON_OF_TOMORROW", "later")
    assert (error.field, error.needed, error.limit, error.retry_after_s) == ("stop.x", 5, 4, 1.5)


async def test_an_older_servers_missing_usage_is_none_and_not_zero() -> None:
    counted = message("ok", finish=EOS)
    counted.deltas[0].usage.output_tokens = 0
    for script, usage in ((message("ok", finish=EOS), None), (counted, OutputUsage(0))):
        async with serving(FakeServer([script])) as fake, Client(fake.target) as client:
            assert (await client.generate("x")).outputs[0].usage == usage
            assert [delta.usage async for delta in client.stream("x")] == [usage]


async def test_an_admin_client_says_that_the_replica_may_be_older() -> None:
    async with serving(FakeServer()) as fake, AdminClient(fake.target) as admin:
        with pytest.raises(errors.FeatureNotSupported, match=r"older than this client.* photon_grpc\.v1\.AdminService"):
            await admin.quarantine()


async def test_unknown_enum_values_of_a_newer_server_are_numbers() -> None:
    finished = message("ok", finish=1234)
    async with serving(FakeServer([finished])) as fake, Client(fake.target) as client:
        fake.state, fake.features = 99, [model_pb2.FEATURE_TEXT, 98]
        model = await client.model()
        assert (model.state, model.features) == ("99", ("TEXT", "98"))
        assert (await client.generate("x")).finish.reason == "1234"


async def test_a_message_of_a_newer_server_before_the_start_is_passed_over() -> None:
    """Such a message could report that the request waits."""
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "gone", [error_info("ENGINE_FAILURE")])
    first = [pb.StreamGenerateResponse(), message("a", start=True), lost]
    async with serving(FakeServer(first, [message("b", finish=EOS)])) as fake, Client(fake.target) as client:
        assert "".join([delta.text async for delta in client.stream("x")]) == "ab"
    assert (fake.requests[1].request_id, fake.requests[1].sampling.seed) == ("r-1", 7)


async def test_a_missing_server_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        async with Client(target, retries=1) as client:
            with pytest.raises(Unreachable, match=target):
                await client.generate("x")
            with pytest.raises(Unreachable, match="Connection refused"):
                await client.wait_until_ready(0.2)


async def test_timeout_ends_the_call_and_travels_as_a_field() -> None:
    async with serving(FakeServer(["hang"])) as fake, Client(fake.target) as client:
        await client.wait_until_ready(60)
        with pytest.raises(errors.DeadlinePassed, match=r"^the deadline has passed$"):
            await client.generate("x", timeout=0.2)
        await asyncio.wait_for(fake.ended.wait(), 120)
    assert fake.requests[0].scheduling.timeout.ToMilliseconds() == 200


@pytest.mark.parametrize("leave", ["cancel", "with", "task", "drop"])
async def test_leaving_early_ends_the_request_on_the_server(leave: str) -> None:
    async with serving(FakeServer([message("a", start=True), "hang"])) as fake, Client(fake.target) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "a"
        if leave == "cancel":
            stream.cancel()
        elif leave == "with":
            async with stream:
                pass
        elif leave == "task":
            reading = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            stream.cancel()
        del stream
        await asyncio.wait_for(fake.ended.wait(), 120)


async def test_readiness_is_waited_for() -> None:
    fake = FakeServer()
    fake.ready = False
    async with serving(fake), Client(fake.target) as client:
        assert await client.is_ready() is False
        with pytest.raises(errors.ModelLoading):
            await client.wait_until_ready(0.2)
        waiting = asyncio.create_task(client.wait_until_ready(30))
        await asyncio.sleep(0)
        fake.ready = True
        await waiting


class Silent(FakeServer):
    """A servicer that accepts calls and answers none."""

    async def Check(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    GetModel = ListModels = Tokenize = Detokenize = Check


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.models(),
        lambda client: client.model(),
        lambda client: client.tokenize("x"),
        lambda client: client.detokenize([1]),
        lambda client: client.is_ready(),
    ],
)
async def test_every_unary_call_has_a_deadline(ask: Any) -> None:
    async with serving(Silent()) as fake, Client(fake.target, timeout=0.1) as client:
        with pytest.raises(errors.DeadlinePassed):
            await asyncio.wait_for(ask(client), 120)


async def test_waiting_for_a_silent_server_ends() -> None:
    async with serving(Silent()) as fake, Client(fake.target) as client:
        with pytest.raises(Unreachable):
            await asyncio.wait_for(client.wait_until_ready(0.2), 120)


async def test_models_are_gathered_over_pages() -> None:
    async with serving(FakeServer()) as fake, Client(fake.target) as client:
        assert [model.name for model in await client.models()] == ["first", "second", "third"]
        model = await client.model()
        assert (model.state, model.features) == ("READY", ("TEXT", "CHAT"))
        assert model.limits["max_stop_strings"] == 64
        with pytest.raises(errors.ModelNotFound, match="no model other"):
            await client.model("other")


def test_a_model_has_its_numerics() -> None:
    parts = model_pb2.Numerics(number=3, libraries=["torch 2"])
    model = read_model(model_pb2.Model(name="demo", numerics_version="0a1b", numerics=parts))
    assert model.numerics_version == "0a1b"
    assert (model.numerics["number"], model.numerics["libraries"]) == (3, ("torch 2",))
    older = read_model(model_pb2.Model(name="demo"))
    assert (older.numerics_version, older.numerics) == ("", {})


async def test_tokenize_takes_texts_and_chats_and_detokenize_takes_ids() -> None:
    async with serving(FakeServer()) as fake, Client(fake.target) as client:
        assert await client.tokenize("abc") == (1, 2, 3)
        assert await client.tokenize([{"role": "user", "content": "hi"}]) == (1, 2, 3)
        assert await client.detokenize([1, 2, 3], skip_special_tokens=False) == "abc"
        with pytest.raises(errors.InvalidRequest):
            await client.tokenize([1, 2])
        await client.tokenize("abc", parse_special_tokens=True, add_special_tokens=False)
    assert not fake.requests[0].HasField("add_special_tokens")
    assert fake.requests[3].parse_special_tokens
    assert fake.requests[3].HasField("add_special_tokens") and not fake.requests[3].add_special_tokens
    assert fake.requests[1].chat.messages[0].content == "hi"
    assert fake.requests[2].HasField("skip_special_tokens")


async def test_a_unix_socket_and_metadata(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with serving(FakeServer(), address) as fake, Client(address, metadata=[("x-team", "blue")]) as client:
        assert (await client.generate("x")).text == "ok"
    assert fake.metadata[0]["x-team"] == "blue"


def test_a_proxy_of_the_environment_is_not_for_this_machine() -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options("127.0.0.1:1", 4)
    assert ("grpc.enable_http_proxy", 0) not in channel_options("example.com:1", 4)
    assert is_loopback("[::1]:1")
    assert is_loopback("localhost:1")
    assert not is_loopback("unix:/run/s")


_FAILING = "connections to all backends failing; last error: "
_HANDSHAKE = (
    "UNKNOWN: ipv4:1.2.3.4:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Connection refused", "Connection refused"),
        ("errors resolving nohost: [nohost: Domain name not found]", "Domain name not found"),
        ("Socket closed", "Socket closed"),
        (
            f"{_FAILING}UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed",
            "Socket closed; do both sides speak TLS (--tls-ca)?",
        ),
        (
            f"{_FAILING}{_HANDSHAKE}OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK",
            "the TLS handshake failed: its certificate is not trusted, self signed certificate",
        ),
        (
            f"{_FAILING}{_HANDSHAKE}OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate: OK",
            "the TLS handshake failed: it does not speak TLS",
        ),
        (
            f"{_FAILING}UNKNOWN: ipv4:1.2.3.4:1: Failed to create security handshaker.",
            "the TLS handshake failed: Failed to create security handshaker.",
        ),
        (f"{_FAILING}Failed parsing HTTP/2 (got frame type 80)", "it does not speak HTTP/2"),
    ],
)
def test_the_systems_error_is_shown_without_grpcs_wrapping(text: str, cause: str) -> None:
    trailers = grpc.aio.Metadata()
    error = to_error(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, trailers, trailers, text), "nohost:1")
    assert isinstance(error, Unreachable)
    assert str(error) == f"no answer from nohost:1 ({cause})"


async def test_scores_are_read_from_a_stream_and_from_a_whole_answer() -> None:
    score = pb.TokenScore(token_id=5, logprob=-0.5, rank=1, token_bytes=b"\xe3")
    score.candidates.add(token_id=6, logprob=-1.5, rank=2, token_bytes=b"b")
    first, last = message("a", start=True), message("b", finish=EOS)
    first.start.prompt.scores.extend([pb.TokenScore(token_id=4, token_bytes=b"x"), score])
    first.deltas[0].scores.append(score)
    expected = TokenScore(5, -0.5, 1, b"\xe3", (Candidate(6, -1.5, 2, b"b"),))
    async with serving(FakeServer([first, last])) as fake, Client(fake.target) as client:
        options = {"logprobs": 1, "prompt_logprobs": 1, "score_token_ids": [6]}
        stream = client.stream("x", **options)
        deltas = [delta async for delta in stream]
        whole = await client.generate("x", **options)
    assert [delta.scores for delta in deltas] == [(expected,), ()]
    assert stream.start is not None
    assert stream.start.prompt_scores == (TokenScore(4, None, 0, b"x"), expected)
    assert whole.outputs[0].scores == (expected,) and whole.prompt_scores == ()
    for request in fake.requests:
        assert (request.output.logprobs, request.output.prompt_logprobs) == (1, 1)
        assert list(request.output.score_token_ids.ids) == [6]
