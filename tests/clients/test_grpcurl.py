"""grpcurl and ghz with a running service, which they know only by reflection: discovery, calls, cancels, counts."""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from photon_grpc.admin.v1 import admin_pb2, admin_pb2_grpc
from tests.server.described import file, message, serialized

from .conftest import Service

INFERENCE = "photon_grpc.v1.InferenceService"

needs_grpcurl = pytest.mark.skipif(shutil.which("grpcurl") is None, reason="no grpcurl")
needs_ghz = pytest.mark.skipif(shutil.which("ghz") is None, reason="no ghz")


def grpcurl(*arguments: str, message: Any = None) -> subprocess.CompletedProcess[str]:
    data = [] if message is None else ["-d", json.dumps(message)]
    return subprocess.run(["grpcurl", "-plaintext", "-format-error", *data, *arguments], capture_output=True, text=True)


def objects(text: str) -> list[Any]:
    """Return the JSON objects in a sequence, with the protos' names of fields."""
    found, decoder = [], json.JSONDecoder(object_hook=named_like_the_protos)
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def named_like_the_protos(fields: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("([A-Z])", r"_\1", name).lower(): value for name, value in fields.items()}


@needs_grpcurl
def test_services_and_their_methods_are_found(target: str) -> None:
    listed = grpcurl(target, "list").stdout.split()
    assert INFERENCE in listed and "photon_grpc.v1.ModelService" in listed
    for service in listed:
        methods = grpcurl(target, "list", service).stdout.split()
        described = grpcurl(target, "describe", service).stdout
        assert re.findall(r"rpc (\w+) \(.* returns \(", described) == [name.rpartition(".")[2] for name in methods]
    for method in methods:
        described = grpcurl(target, "describe", method).stdout
        assert " returns (" in described


@needs_grpcurl
def test_a_message_of_a_type_that_only_the_caller_knows_is_printed(target: str) -> None:
    described = file(syntax="proto2")
    message(described, "Flag", "ok: required bool")
    wanted = {"file_descriptor_set": base64.b64encode(serialized(described)).decode(), "message_type": "acme.Flag"}
    request = {"text": "x", "structured_output": {"protobuf": wanted}, "stop": {"max_tokens": 32}}
    (whole,) = objects(grpcurl(target, f"{INFERENCE}/Generate", message=request).stdout)
    (output,) = whole["outputs"]
    value = {'{"ok":true}': b"\x08\x01", '{"ok":false}': b"\x08\x00"}[output["text"]]
    packed = {"type_url": "type.googleapis.com/acme.Flag", "value": base64.b64encode(value).decode()}
    assert output["message"] == packed


@needs_grpcurl
def test_a_stream_joined_is_the_whole(target: str) -> None:
    request = {"text": "def fib(n):", "sampling": {"temperature": 0}, "stop": {"max_tokens": 16, "ignore_eos": True}}
    (whole,) = objects(grpcurl(target, f"{INFERENCE}/Generate", message=request).stdout)
    messages = objects(grpcurl(target, f"{INFERENCE}/StreamGenerate", message=request).stdout)
    joined = "".join(delta.get("text", "") for message in messages for delta in message.get("deltas", ()))
    assert joined == whole["outputs"][0]["text"]
    assert messages[-1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 16


@needs_grpcurl
def test_an_error_shows_its_details(target: str) -> None:
    done = grpcurl(target, f"{INFERENCE}/Generate", message={"text": "x", "stop": {"max_tokens": 1_000_000}})
    (error,) = objects(done.stderr)
    details = {detail["@type"].rpartition(".")[2]: detail for detail in error["details"]}
    assert details["ErrorInfo"]["reason"] == "PROMPT_TOO_LONG"
    assert details["ErrorInfo"]["metadata"]["limit"] == "4096"
    assert details["BadRequest"]["field_violations"][0]["field"] == "stop.max_tokens"


@needs_grpcurl
def test_ctrl_c_ends_the_request_on_the_server(service: Service) -> None:
    endless = {"text": "import ", "stop": {"ignore_eos": True}, "stream": {"max_tokens_per_message": 1}}
    command = ["grpcurl", "-plaintext", "-d", json.dumps(endless), service.address, f"{INFERENCE}/StreamGenerate"]
    with (
        grpc.insecure_channel(f"unix:{service.admin_socket}") as channel,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        wait_for(lambda: num_running(admin) == 1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
        wait_for(lambda: num_running(admin) == 0)
    assert process.returncode != 0
    assert '"finish"' not in output


def num_running(admin: admin_pb2_grpc.AdminServiceStub) -> int:
    load = admin.GetLoad(admin_pb2.GetLoadRequest()).load
    return load.running_requests + load.queued_requests


def wait_for(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.05)


@needs_ghz
@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
def test_ghz_counts_what_it_loads_with(method: str, target: str) -> None:
    assert statuses(target, method, {"text": "def fib(n):", "stop": {"max_tokens": 4}}) == {"OK": 40}
    assert statuses(target, method, {"text": "x", "sampling": {"top_p": 0}}) == {"InvalidArgument": 40}


def statuses(target: str, method: str, message: Any) -> dict[str, int]:
    call = ["--insecure", "--call", f"{INFERENCE}.{method}", "-d", json.dumps(message), "-n", "40", "-c", "8"]
    done = subprocess.run(["ghz", *call, "--format", "json", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted: dict[str, int] = json.loads(done.stdout)["statusCodeDistribution"]
    return counted
