"""Writes the descriptor set of the public service, for Envoy's JSON transcoder and tools such as grpcurl.

Unlike the output of `buf build protos`, it has the types of error details. Without these, Envoy sends errors with an
empty body.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from fissile.v1 import errors_pb2, inference_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2

PLACE: Final = Path(__file__).resolve().parents[1] / "deploy" / "mesh" / "fissile.binpb"
FILES: Final = (inference_pb2, errors_pb2, error_details_pb2, status_pb2)


def descriptor_set() -> FileDescriptorSet:
    """Descriptors of all proto files, each file after the files that it imports."""
    found: dict[str, FileDescriptorProto] = {}

    def add(files: Iterable[Any]) -> None:
        for file in files:
            if file.name not in found:
                add(file.dependencies)
                made = FileDescriptorProto()
                file.CopyToProto(made)
                found[file.name] = made

    add(module.DESCRIPTOR for module in FILES)
    return FileDescriptorSet(file=found.values())


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE
    place.write_bytes(descriptor_set().SerializeToString(deterministic=True))
