"""The standard services: their names, and the descriptors and messages of all services that are served, as protoc wrote
them (protos/generate.py).

They have a pool of their own. The packages of gRPC bring older ones of the same files (grpcio-health-checking lacks
Health.List), xds-protos overwrites files of other packages, and a process may define a file once in a pool.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

HEALTH = "grpc.health.v1.Health"
#: `v1alpha` for old clients; others have dropped it.
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
LOAD_REPORTS = "xds.service.orca.v3.OpenRcaService"

#: Each stands after those that it imports.
ALL = FileDescriptorSet.FromString(resources.files("photon_grpc.v1").joinpath("descriptors.binpb").read_bytes()).file

_POOL = DescriptorPool()
for _file in ALL:
    _POOL.AddSerializedFile(_file.SerializeToString())

#: Of the standard services.
FILES = tuple(_POOL.FindFileContainingSymbol(name) for name in (HEALTH, LOAD_REPORTS, *REFLECTION))


def message_class(name: str) -> Any:
    """Return the class of a message by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))
