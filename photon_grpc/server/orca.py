"""The messages of ORCA: xds.data.orca.v3.OrcaLoadReport and the service that streams them.

https://github.com/cncf/xds/tree/main/xds/data/orca/v3. They are built here, in a pool of their own: xds-protos, the
package that has them, overwrites files of googleapis-common-protos and opentelemetry-proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

_PROTO = descriptor_pb2.FieldDescriptorProto
_DATA, _SERVICE = "xds.data.orca.v3", "xds.service.orca.v3"
_REPORT = f".{_DATA}.OrcaLoadReport"
_DOUBLES = {
    "cpu_utilization": 1,
    "mem_utilization": 2,
    "rps_fractional": 6,
    "eps": 7,
    "application_utilization": 9,
}
#: From names to doubles.
_MAPS = {"request_cost": 4, "utilization": 5, "named_metrics": 8}


def _data_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="xds/data/orca/v3/orca_load_report.proto", package=_DATA, syntax="proto3"
    )
    report = file.message_type.add(name="OrcaLoadReport")
    for name, number in _DOUBLES.items():
        report.field.add(name=name, number=number, label=_PROTO.LABEL_OPTIONAL, type=_PROTO.TYPE_DOUBLE)
    report.field.add(name="rps", number=3, label=_PROTO.LABEL_OPTIONAL, type=_PROTO.TYPE_UINT64)
    for name, number in _MAPS.items():
        entry = report.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_PROTO.LABEL_OPTIONAL, type=_PROTO.TYPE_STRING)
        entry.field.add(name="value", number=2, label=_PROTO.LABEL_OPTIONAL, type=_PROTO.TYPE_DOUBLE)
        entry_type = f"{_REPORT}.{entry.name}"
        kind = _PROTO.TYPE_MESSAGE
        report.field.add(name=name, number=number, label=_PROTO.LABEL_REPEATED, type=kind, type_name=entry_type)
    return file


def _service_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="xds/service/orca/v3/orca.proto", package=_SERVICE, syntax="proto3")
    file.dependency.extend(("xds/data/orca/v3/orca_load_report.proto", duration_pb2.DESCRIPTOR.name))
    request = file.message_type.add(name="OrcaLoadReportRequest")
    duration = ".google.protobuf.Duration"
    request.field.add(
        name="report_interval", number=1, label=_PROTO.LABEL_OPTIONAL, type=_PROTO.TYPE_MESSAGE, type_name=duration
    )
    request.field.add(name="request_cost_names", number=2, label=_PROTO.LABEL_REPEATED, type=_PROTO.TYPE_STRING)
    service = file.service.add(name="OpenRcaService")
    request_type = f".{_SERVICE}.OrcaLoadReportRequest"
    service.method.add(name="StreamCoreMetrics", input_type=request_type, output_type=_REPORT, server_streaming=True)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
for _file in (_data_file(), _service_file()):
    _pool.AddSerializedFile(_file.SerializeToString())

#: As of a module that was generated.
DESCRIPTOR: Any = _pool.FindFileByName("xds/service/orca/v3/orca.proto")
SERVICE: str = DESCRIPTOR.services_by_name["OpenRcaService"].full_name

OrcaLoadReport: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName(_REPORT.strip(".")))
OrcaLoadReportRequest: Any = message_factory.GetMessageClass(
    _pool.FindMessageTypeByName(f"{_SERVICE}.OrcaLoadReportRequest")
)
