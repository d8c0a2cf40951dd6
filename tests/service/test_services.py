"""An operator's own service, answered by the embedded model: real processes, dynamic stubs, keys, ends, metadata."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.server.keys import block, write_keys
from tests.service.running import ROOT, SERVING, WITH_MODEL, RunningService, modelless, serving

SERVICE = "acme.v1.TriageService"
BRIEF = """
syntax = "proto3";
package acme.v1;
import "photon_grpc/v1/service.proto";
import "triage.proto";
// Answers with too few tokens.
service Brief {
  rpc Cut(Ticket) returns (Verdict) { option (photon_grpc.v1.model) = {max_tokens: 1}; }
  rpc CutList(Ticket) returns (stream Verdict) { option (photon_grpc.v1.model) = {max_tokens: 1}; }
}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with triage.binpb, of both services, and keys.toml."""
    made = tmp_path_factory.mktemp("services")
    (made / "brief.proto").write_text(BRIEF)
    includes = (made, ROOT / "clients" / "triage", ROOT / "protos", files("grpc_tools") / "_proto")
    flags = ("--include_imports", "--include_source_info", f"--descriptor_set_out={made / 'triage.binpb'}")
    assert not protoc.main(["protoc", *[f"-I{each}" for each in includes], *flags, "triage.proto", "brief.proto"])
    scopes = [f"service:{SERVICE}", "service:acme.v1.Brief"]
    write_keys(made / "keys.toml", block("ours", "of-ours", scopes=scopes) + block("text", "of-text"))
    return made


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[RunningService]:
    flags = ("--service", str(directory / "triage.binpb"), "--api-keys-file", str(directory / "keys.toml"))
    with serving(
        *flags, "--frontends", "2", "--api-keys-exempt", "health", "--api-keys-exempt", "reflection"
    ) as service:
        service.wait_ready()
        yield service
        assert service.end() == 0
        assert "confidential" not in "\n".join(service.lines)


@pytest.fixture
def channel(service: RunningService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.wait_ready()[0]) as channel:
        yield channel


class Stub:
    """The stub of a caller who has the .proto."""

    def __init__(self, channel: grpc.Channel, directory: Path, key: str = "of-ours") -> None:
        self._channel = channel
        self._pool = DescriptorPool()
        self._metadata = (("authorization", f"Bearer {key}"),)
        for file in descriptor_pb2.FileDescriptorSet.FromString((directory / "triage.binpb").read_bytes()).file:
            self._pool.Add(file)

    def message(self, name: str, **fields: Any) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"acme.v1.{name}"))(**fields)

    def call(self, method: str, request: Any, response: str) -> Any:
        made = self._channel.unary_unary(f"/{method}", type(request).SerializeToString, self._parse(response))
        return made.with_call(request, timeout=120, metadata=self._metadata)

    def stream(self, method: str, request: Any, response: str) -> Any:
        made = self._channel.unary_stream(f"/{method}", type(request).SerializeToString, self._parse(response))
        return made(request, timeout=120, metadata=self._metadata)

    def _parse(self, name: str) -> Any:
        return type(self.message(name)).FromString


@pytest.fixture
def stub(channel: grpc.Channel, directory: Path) -> Stub:
    return Stub(channel, directory)


def reason(error: grpc.RpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])  # type: ignore[attr-defined]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


def test_an_answer_is_the_response_with_usage_in_its_trailers(stub: Stub) -> None:
    ticket = stub.message("Ticket", subject="leak", email="confidential@example.com")
    verdict, call = stub.call(f"{SERVICE}/Triage", ticket, "Verdict")
    assert verdict.DESCRIPTOR.full_name == "acme.v1.Verdict"
    trailers = dict(call.trailing_metadata())
    used = pb.GenerateResponse.FromString(trailers["x-photon-usage-bin"])
    assert used.model == "photon-demo" and used.usage.prompt_tokens > 50 and used.usage.output_tokens > 0
    assert used.timing.total_duration.ToNanoseconds() > 0 and not used.outputs


def test_a_stream_has_complete_messages_up_to_a_maximum(stub: Stub) -> None:
    call = stub.stream(f"{SERVICE}/Plan", stub.message("Ticket", subject="leak"), "Step")
    steps = list(call)
    assert len(steps) <= 32
    assert pb.GenerateResponse.FromString(dict(call.trailing_metadata())["x-photon-usage-bin"]).usage.output_tokens


def test_the_shared_part_of_the_prompt_is_cached(stub: Stub) -> None:
    cached = []
    for number in range(6):  # two front ends share one engine
        _, call = stub.call(f"{SERVICE}/Triage", stub.message("Ticket", subject=f"{number} leaks"), "Verdict")
        used = pb.GenerateResponse.FromString(dict(call.trailing_metadata())["x-photon-usage-bin"]).usage
        cached.append(used.cached_prompt_tokens / used.prompt_tokens)
    assert max(cached) > 0.7


def test_random_answers_to_hostile_requests_parse(stub: Stub) -> None:
    texts = ("", "{{ 7*7 }}", "{% for x in y %}", "<|end|><|system|>", '"}]\n', "\x00\u2028", "ü" * 300)

    def ask(text: str) -> str:
        return stub.call(f"{SERVICE}/Triage", stub.message("Ticket", body=text), "Verdict")[1].code().name

    with ThreadPoolExecutor(len(texts)) as pool:
        assert set(pool.map(ask, texts)) == {"OK"}


def test_unknown_fields_of_a_request_are_fine(stub: Stub) -> None:
    ticket = stub.message("Ticket").FromString(b"\xf8\x3f\x01")
    assert stub.call(f"{SERVICE}/Triage", ticket, "Verdict")[1].code() is grpc.StatusCode.OK


def test_a_request_too_long_names_its_largest_field(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError, match="the largest field of the request is body") as caught:
        stub.call(f"{SERVICE}/Triage", stub.message("Ticket", subject="s", body="leak " * 200_000), "Verdict")
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")


def test_a_cut_answer_is_a_failed_precondition_with_its_usage(stub: Stub) -> None:
    for ask in (
        lambda: stub.call("acme.v1.Brief/Cut", stub.message("Ticket"), "Verdict"),
        lambda: [stub.stream("acme.v1.Brief/CutList", stub.message("Ticket"), "Verdict") for _ in range(8)],
    ):
        with pytest.raises(grpc.RpcError) as caught:
            calls = ask()
            for call in calls:
                list(call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason(caught.value) == "ANSWER_INCOMPLETE"
        trailers = dict(caught.value.trailing_metadata())
        assert pb.GenerateResponse.FromString(trailers["x-photon-usage-bin"]).usage.output_tokens == 1


def test_each_service_has_a_scope_of_its_own(channel: grpc.Channel, directory: Path) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        text = Stub(channel, directory, "of-text")
        text.call(f"{SERVICE}/Triage", text.message("Ticket"), "Verdict")
    assert reason(caught.value) == "SCOPE_REQUIRED"
    with pytest.raises(grpc.RpcError) as caught:
        metadata = (("authorization", "Bearer of-ours"),)
        inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"), metadata=metadata)
    assert reason(caught.value) == "SCOPE_REQUIRED"


def test_health_and_reflection_know_it(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status == SERVING
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    assert [each.name for each in pool.FindServiceByName(SERVICE).methods] == ["Triage", "Plan"]
    assert pool.FindMessageTypeByName("acme.v1.Verdict").fields_by_name["team"].enum_type.name == "Team"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("gone.binpb", "gone.binpb: No such file"),
        ("keys.toml", "is not a serialized google.protobuf.FileDescriptorSet"),
        ("triage.binpb:acme.v1.Gone", "no such service; it has acme.v1.TriageService, acme.v1.Brief"),
        ("brief.proto", "photon_grpc/v1/service.proto: File not found"),
        ("gone.proto", "gone.proto: No such file"),
    ],
)
def test_a_set_that_cannot_be_served_ends_the_start_by_its_name(directory: Path, flag: str, words: str) -> None:
    with modelless("--service", str(directory / flag)) as failing:
        assert failing.process.wait() == 2
        failing._reading.join()
        assert words in "\n".join(failing.lines)


def test_a_proto_file_is_compiled_with_its_comments(directory: Path) -> None:
    paths = (ROOT / "clients" / "triage", ROOT / "protos")
    includes = [word for each in paths for word in ("--proto-path", str(each))]
    command = [*WITH_MODEL, "service", "explain", f"{directory / 'brief.proto'}:acme.v1.Brief.Cut", *includes]
    assert "too few tokens" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_doctor_finds_what_serve_would_refuse(directory: Path) -> None:
    command = [*WITH_MODEL, "doctor", "--device", "cpu", "--listen", "127.0.0.1:0"]
    bad = subprocess.run(
        [*command, "--service", f"{directory / 'triage.binpb'}:acme.v1.Gone"], cwd=ROOT, capture_output=True, text=True
    )
    assert bad.returncode == 1 and "it has acme.v1.TriageService" in bad.stdout


def test_explain_prints_the_prompt(directory: Path) -> None:
    method = f"{directory / 'triage.binpb'}:{SERVICE}.Triage"
    command = [*WITH_MODEL, "service", "explain", method, "--request", '{"subject":"leak","email":"e@x"}']
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "coffee machines" in shown and '{"subject": "leak"}' in shown and "e@x" not in shown
