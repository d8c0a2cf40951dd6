"""The names of the standard services, and descriptors and messages of all services, as protoc wrote them.

See protos/generate.py. They have their own pool, since a pool may define a file only once: gRPC's packages have older
versions of the same files (grpcio-health-checking lacks Health.List), and xds-protos overwrites others' files.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

HEALTH = "grpc.health.v1.Health"
#: `v1alpha` is for old clients.
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
LOAD_REPORTS = "xds.service.orca.v3.OpenRcaService"

#: Each file follows those that it imports.
ALL = FileDescriptorSet.FromString(resources.files("photon_grpc.v1").joinpath("descriptors.binpb").read_bytes()).file

_POOL = DescriptorPool()
for _file in ALL:
    _POOL.AddSerializedFile(_file.SerializeToString())

#: The files of the standard services.
FILES = tuple(_POOL.FindFileContainingSymbol(name) for name in (HEALTH, LOAD_REPORTS, *REFLECTION))


def message_class(name: str) -> Any:
    """Return the class of a message by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))
