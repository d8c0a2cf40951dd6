"""API keys of a whole service: owners are apart, quotas hold, the file is read again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.keys import bearer, block, write_keys
from tests.service.running import SERVING, Client, RunningService, client, modelless, wait_until
from tests.service.test_processes import reason_of
from tests.service.tiny import write_tiny_model

OWNERS = (
    block("alice", "secret-of-alice") + block("bob", "secret-of-bob") + block("one", "secret-of-one", max_concurrent=1)
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", OWNERS)


@pytest.fixture(scope="module")
def service(file: Path) -> Iterator[RunningService]:
    tiny = write_tiny_model(file.parent / "tiny")
    flags = ("--model", str(tiny), "--load-format", "dummy", "--num-blocks", "512", "--api-keys-file", str(file))
    with modelless(*flags) as service:
        service.wait_ready()
        yield service
        assert service.end() == 0
        assert "secret" not in "\n".join(service.lines)


@pytest.fixture
def stub(service: RunningService) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(service.wait_ready()[0]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def request(text: str, max_tokens: int = 2, request_id: str = "") -> pb.GenerateRequest:
    asked = pb.GenerateRequest(text=text, request_id=request_id)
    asked.stop.max_tokens, asked.stop.ignore_eos = max_tokens, True
    return asked


def key_of(name: str) -> dict[str, object]:
    return {"metadata": bearer(f"secret-of-{name}"), "timeout": 60}


@contextlib.contextmanager
def streaming(stub: inference_pb2_grpc.InferenceServiceStub, owner: str, request_id: str = "") -> Iterator[None]:
    """Begin a long generation."""
    call = stub.StreamGenerate(request("def", 3000, request_id), **key_of(owner))
    next(call)
    try:
        yield
    finally:
        call.cancel()


def refusal(stub: inference_pb2_grpc.InferenceServiceStub, asked: pb.GenerateRequest, owner: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(asked, **key_of(owner))
    return reason_of(caught.value)


def test_an_id_is_taken_within_its_owner_only(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    with streaming(stub, "alice", "the-id"):
        assert refusal(stub, request("x", request_id="the-id"), "alice") == "DUPLICATE_REQUEST_ID"
        stub.Generate(request("x", request_id="the-id"), **key_of("bob"))


def test_a_prefix_is_shared_within_its_owner_only(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    def cached(owner: str) -> int:
        return int(stub.Generate(request("a prompt of some blocks " * 10), **key_of(owner)).usage.cached_prompt_tokens)

    assert [cached("alice"), cached("bob")] == [0, 0]
    assert cached("alice") == cached("bob") > 0


def test_a_quota_is_of_one_owner(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    with streaming(stub, "one"):
        assert refusal(stub, request("x"), "one") == "QUOTA_EXCEEDED"
        stub.Generate(request("x"), **key_of("alice"))

    def is_free() -> bool:
        try:
            stub.Generate(request("x"), **key_of("one"))
        except grpc.RpcError:
            return False
        return True

    wait_until(is_free, "the place of the cancelled call")


def test_probes_need_no_key_and_callers_do(service: RunningService) -> None:
    with client(service.wait_ready()[0]) as call:
        assert call.health("") == SERVING
        assert_missing(call)


def assert_missing(call: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call.generate()
    assert reason_of(caught.value) == "MISSING_CREDENTIALS"


def test_the_file_is_read_again(
    service: RunningService, file: Path, stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    assert refusal(stub, request("x"), "carol") == "INVALID_CREDENTIALS"
    write_keys(file, OWNERS, "[[key]")
    wait_until(lambda: any("3 previous keys stay" in line for line in service.lines), "a line about a broken file")
    stub.Generate(request("x"), **key_of("alice"))
    write_keys(file, OWNERS, block("carol", "secret-of-carol"))
    wait_until(lambda: any("4 API keys are in force" in line for line in service.lines), "a line about new keys")
    stub.Generate(request("x"), **key_of("carol"))


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", block("a", "x", ["root"]))
    with modelless("--api-keys-file", str(path)) as service:
        assert service.process.wait() == 2
        wait_until(lambda: any("cannot start" in line for line in service.lines), "the reason")
    (line,) = [line for line in service.lines if "cannot start" in line]
    assert str(path) in line and "key[0].scopes[0]" in line
