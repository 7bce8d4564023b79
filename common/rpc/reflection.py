"""Server reflection under both of its names: `grpc.reflection.v1`, and `v1alpha`, the only one that the library has.

The two are the same on the wire, so one servicer serves both. Tools ask for the descriptor of v1, because v1 is listed.
It is the library's descriptor with its package renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from fissile.v1 import errors_pb2
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_ALPHA: Final = "grpc.reflection.v1alpha"
_V1: Final = "grpc.reflection.v1"
_V1_FILE: Final = "grpc/reflection/v1/reflection.proto"
# Loads the file of error reasons, which no service's file imports: reflection only describes loaded files.
_REASONS: Final = errors_pb2.DESCRIPTOR
SERVICE_NAMES: Final = (reflection.SERVICE_NAME, f"{_V1}.ServerReflection")


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serves reflection of the services with these full names, and of itself."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICE_NAMES))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(f"{_V1}.ServerReflection", {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Adds the descriptor of v1 to the process's pool, unless a library has added it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        pool.AddSerializedFile(_renamed().SerializeToString())


def _renamed() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = _V1_FILE, _V1
    file.ClearField("options")
    for field in (field for message in file.message_type for field in message.field if field.type_name):
        field.type_name = field.type_name.replace(_ALPHA, _V1)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(_ALPHA, _V1)
        method.output_type = method.output_type.replace(_ALPHA, _V1)
    return file
