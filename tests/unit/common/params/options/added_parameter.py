"""Adds a sampling parameter to the table and both protos before any module reads them; prints where it appears."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType
from typing import Any

import click
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from common.params import sampling_params as table
from common.params.options.option import Option
from common.params.sampling_checks import real

NUMBER = 1000


def add_field(module: ModuleType) -> None:
    """Adds `optional float made_up` to SamplingParams of a proto, in a separate descriptor pool."""
    pool = descriptor_pool.DescriptorPool()

    def add(file: FileDescriptor) -> None:
        for each in file.dependencies:
            add(each)
        made = FileDescriptorProto()
        file.CopyToProto(made)
        if file is module.DESCRIPTOR:
            message = next(each for each in made.message_type if each.name == "SamplingParams")
            message.oneof_decl.add(name="_made_up")
            message.field.add(
                name="made_up",
                number=NUMBER,
                type=FieldDescriptorProto.TYPE_FLOAT,
                label=FieldDescriptorProto.LABEL_OPTIONAL,
                oneof_index=len(message.oneof_decl) - 1,
                proto3_optional=True,
            )
        pool.Add(made)

    add(module.DESCRIPTOR)
    name = module.SamplingParams.DESCRIPTOR.full_name
    module.SamplingParams = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))  # type: ignore[attr-defined]


def add_row() -> None:
    """Adds the SamplingParams field that is the parameter's row in the table."""
    row = table.Parameter(
        real("a number from 0 to 1", lambda value: 0.0 <= value <= 1.0),
        (Option("--made-up", "FISSILE_MADE_UP", "Number of a test.", ("generate", "chat"), click.FLOAT),),
        shapes_distribution=True,
    )
    made_up = ("made_up", float, dataclasses.field(default=0.5, metadata={table.Parameter: row}))
    kind = dataclasses.make_dataclass(
        "SamplingParams", [made_up], bases=(table.SamplingParams,), frozen=True, slots=True
    )
    rows = {each.name: each.metadata[table.Parameter] for each in dataclasses.fields(kind)}
    table.SamplingParams, table.PARAMETERS = kind, rows  # type: ignore[misc, assignment]
    table.DISTRIBUTION_FIELDS = (*table.DISTRIBUTION_FIELDS, "made_up")  # type: ignore[misc]


def main() -> None:
    """Prints the parameter's value at each stage from command line to worker, and the other places where it appears."""
    add_field(pb)
    add_field(wpb)
    add_row()
    from fissile.receipts import canonical_params

    from common.cli.client.generate import generate, given
    from common.cli.core.client import Question
    from common.errors import InvalidFieldError
    from common.wire.sampling_protos import sampling_from_proto, sampling_to_proto
    from router.validation import GENERATE_SERVED, sampling_params
    from scripts.option_reference import page

    values = generate.make_context("generate", ["hello", "--made-up", "0.25"]).params
    sent: Any = Question("hello", sampling=given({"made_up": values["made_up"]})).sampling_params
    params: Any = sampling_params(sent, table.SamplingParams(), 100)
    wire: Any = sampling_to_proto(params)
    canonical: Any = canonical_params(pb.SamplingParams(), table.SamplingParams())
    try:
        sampling_params(pb.SamplingParams(made_up=2.0), table.SamplingParams(), 100)  # type: ignore[call-arg]
        refusal = ""
    except InvalidFieldError as error:
        refusal = str(error)
    found = {
        "sent": sent.made_up,
        "validated": params.made_up,
        "on the wire": wire.made_up,
        "at the worker": sampling_from_proto(wire).made_up,  # type: ignore[attr-defined]
        "default": sampling_params(pb.SamplingParams(), table.SamplingParams(), 100).made_up,  # type: ignore[attr-defined]
        "canonical": canonical.made_up,
        "served": "sampling_params.made_up" in GENERATE_SERVED,
        "refusal": refusal,
        "page": ["`FISSILE_MADE_UP`" in page(), "`FISSILE_BENCH_MADE_UP`" in page()],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
