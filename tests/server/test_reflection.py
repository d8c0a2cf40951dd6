"""Reflection under both names, as generic clients use it."""

from __future__ import annotations

import asyncio
import shutil
from importlib import resources
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]

BOTH = ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "photon_grpc.v1.InferenceService",
    "photon_grpc.v1.ModelService",
    "xds.service.orca.v3.OpenRcaService",
]


async def ask(channel: grpc.aio.Channel, service: str, **question: str) -> reflection_pb2.ServerReflectionResponse:
    (response,) = await ask_all(channel, service, [question])
    return response


async def ask_all(
    channel: grpc.aio.Channel, service: str, questions: list[dict[str, str]]
) -> list[reflection_pb2.ServerReflectionResponse]:
    """Return the answers to `questions` on one stream."""
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(**question) for question in questions]))
    return [response async for response in call]


def files_of(response: reflection_pb2.ServerReflectionResponse) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    files = map(descriptor_pb2.FileDescriptorProto.FromString, response.file_descriptor_response.file_descriptor_proto)
    return {file.name: file for file in files}


@pytest.mark.parametrize("version", BOTH)
async def test_what_is_listed_is_served_and_described(channel: grpc.aio.Channel, version: str) -> None:
    response = await ask(channel, version, list_services="")
    listed = [service.name for service in response.list_services_response.service]
    assert listed == SERVICES
    for name in listed:
        files = files_of(await ask(channel, version, file_containing_symbol=name))
        assert any(name == f"{file.package}.{service.name}" for file in files.values() for service in file.service)
        # A client can build them without asking again.
        assert all(dependency in files for file in files.values() for dependency in file.dependency)


@pytest.mark.parametrize("service", ["photon_grpc.v1.InferenceService", "photon_grpc.v1.ModelService"])
async def test_files_are_those_that_protoc_writes(channel: grpc.aio.Channel, service: str, tmp_path: Path) -> None:
    path = tmp_path / "set"
    include = [
        f"-I{ROOT / 'protos'}",
        f"-I{ROOT / 'protos' / 'third_party'}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
    ]
    sources = [f"photon_grpc/v1/{name}.proto" for name in ("inference", "model", "errors")]
    assert protoc.main(["protoc", *include, f"--descriptor_set_out={path}", "--include_imports", *sources]) == 0
    written = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file}
    served = files_of(await ask(channel, BOTH[0], file_containing_symbol=service))
    assert served == {name: written[name] for name in served}


@pytest.mark.parametrize("version", BOTH)
async def test_every_field_has_its_name_in_json(channel: grpc.aio.Channel, version: str) -> None:
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for name in (*SERVICES, "google.rpc.ErrorInfo"):
        files |= files_of(await ask(channel, version, file_containing_symbol=name))
    # Clients write JSON with the names in the descriptors; Python's own classes use the default names.
    for file in files.values():
        fields = [field for message in file.message_type for field in message.field]
        nested = [field for message in file.message_type for each in message.nested_type for field in each.field]
        assert [field.name for field in (*fields, *nested) if not field.HasField("json_name")] == []


async def test_v1_is_described_as_v1alpha_in_a_package_of_its_own(channel: grpc.aio.Channel) -> None:
    (v1,) = files_of(await ask(channel, BOTH[0], file_containing_symbol=BOTH[0])).values()
    (v1alpha,) = files_of(await ask(channel, BOTH[0], file_containing_symbol=BOTH[1])).values()
    assert (v1.name, v1.package) == ("grpc/reflection/v1/reflection.proto", "grpc.reflection.v1")
    assert v1alpha.options.deprecated
    v1alpha.options.ClearField("deprecated")
    assert v1 == text_format.Parse(str(v1alpha).replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())


@pytest.mark.parametrize("version", BOTH)
async def test_health_is_described_as_it_is_served(channel: grpc.aio.Channel, version: str) -> None:
    files = files_of(await ask(channel, version, file_containing_symbol="grpc.health.v1.Health"))
    (service,) = next(iter(files.values())).service
    # The order differs between releases of the package.
    assert {method.name for method in service.method} == {"Check", "Watch", "List"}


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize("detail", ["ErrorInfo", "BadRequest", "RetryInfo"])
async def test_details_of_errors_are_described(channel: grpc.aio.Channel, version: str, detail: str) -> None:
    files = files_of(await ask(channel, version, file_containing_symbol=f"google.rpc.{detail}"))
    assert any(message.name == detail for file in files.values() for message in file.message_type)


@pytest.mark.parametrize("version", BOTH)
async def test_an_unknown_symbol_is_an_error_response(channel: grpc.aio.Channel, version: str) -> None:
    response = await ask(channel, version, file_containing_symbol="nobody.Knows")
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def symbols_of(scope: str, part: Message) -> set[str]:
    """Return the full names of all that a file, message or enum defines: everything in its descriptor with a name."""
    found = set()
    for field, value in part.ListFields():
        for child in value if field.is_repeated and field.message_type else ():
            if "name" in child.DESCRIPTOR.fields_by_name:
                name = f"{scope}.{child.name}"
                found.add(name)
                # The values of an enum are in the scope of the enum itself.
                found |= symbols_of(scope if isinstance(child, descriptor_pb2.EnumDescriptorProto) else name, child)
    return found


@pytest.mark.parametrize("version", BOTH)
async def test_every_symbol_of_every_file_leads_to_the_file_that_defines_it(
    channel: grpc.aio.Channel, version: str
) -> None:
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for name in (*SERVICES, "google.rpc.ErrorInfo"):
        files |= files_of(await ask(channel, version, file_containing_symbol=name))
    defined = {symbol: name for name, file in files.items() for symbol in symbols_of(file.package, file)}
    assert {
        "photon_grpc.v1.InferenceService.Generate",
        "photon_grpc.v1.GenerateRequest.text",
        "photon_grpc.v1.GenerateRequest.input",
        "photon_grpc.v1.FinishReason",
        "photon_grpc.v1.FINISH_REASON_EOS",
        "grpc.health.v1.HealthCheckResponse.SERVING",
        "google.rpc.ErrorInfo.MetadataEntry.key",
        "google.protobuf.Timestamp.nanos",
    } <= defined.keys(), sorted(defined)
    # The spelling of grpcurl.
    defined["photon_grpc.v1.FinishReason.FINISH_REASON_EOS"] = defined["photon_grpc.v1.FinishReason"]
    answers = await ask_all(channel, version, [{"file_containing_symbol": symbol} for symbol in defined])
    for (symbol, name), answer in zip(defined.items(), answers, strict=True):
        assert name in files_of(answer), symbol
        assert answer.original_request.file_containing_symbol == symbol


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize(
    "symbol",
    [
        "",
        "photon_grpc",
        "photon_grpc.v1",
        "InferenceService",
        "photon_grpc.v1.InferenceService.Nothing",
        "photon_grpc.v1.InferenceService.",
        ".photon_grpc.v1.InferenceService",
        "photon_grpc/v1/inference.proto",
        "photon_grpc.admin.v1.AdminService",
    ],
)
async def test_an_invalid_symbol_is_not_found(channel: grpc.aio.Channel, version: str, symbol: str) -> None:
    response = await ask(channel, version, file_containing_symbol=symbol)
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="no grpcurl")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], "photon_grpc.v1.InferenceService"),
        (["describe"], "rpc StreamGenerate"),
        (["describe", "photon_grpc.v1.GenerateRequest"], "SamplingParams"),
        (["describe", "photon_grpc.v1.InferenceService.Generate"], "rpc Generate ("),
        (["describe", "photon_grpc.v1.FinishReason.FINISH_REASON_EOS"], "FINISH_REASON_EOS = "),
        (["describe", "photon_grpc.v1.GenerateRequest.sampling"], "SamplingParams sampling"),
        (["photon_grpc.v1.ModelService/GetModel"], '"maxContextTokens": 4096'),
        *((["describe", service], f"{service} is a service") for service in SERVICES),
        (["grpc.health.v1.Health/List"], '"SERVING"'),
    ],
)
async def test_grpcurl(address: str, arguments: list[str], expected: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "grpcurl",
        "-plaintext",
        address,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert (process.returncode, expected in output.decode()) == (0, True), output.decode()
