"""The client's argument types match the protos, and type checkers find wrong arguments."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fissile.client import AsyncClient, Client, Connection
from fissile.client import arguments as given
from fissile.client.calls import chat_request, embed_request, generate_request, rerank_request, score_request
from fissile.v1 import inference_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[3]
USES = Path(__file__).with_name("uses")
# Fields that are positional arguments, or that the client sets itself.
NOT_NAMED = {
    pb.GenerateRequest: {"text", "token_ids", "resume"},
    pb.ChatRequest: {"messages", "resume"},
    pb.EmbedRequest: {"inputs"},
    pb.RerankRequest: {"query", "documents"},
    pb.ScoreRequest: {"context", "continuations"},
    pb.OutputOptions: {"receipt"},
}
SPREAD = {*pb.SamplingParams.DESCRIPTOR.fields_by_name, *pb.OutputOptions.DESCRIPTOR.fields_by_name} - {"receipt"}
OF_CALL = {"timeout_s", "metadata", "receipt"}
TYPES = [
    (given.SamplingArguments, pb.SamplingParams, set()),
    (given.OutputArguments, pb.OutputOptions, set()),
    (given.ConstraintArguments, pb.Constraint, set()),
    (given.ReceiptArguments, pb.ReceiptOptions, set()),
    (given.ReasoningArguments, pb.ReasoningOptions, set()),
    (given.ToolChoiceArguments, pb.ToolChoice, set()),
    (given.GenerateArguments, pb.GenerateRequest, SPREAD | OF_CALL),
    (given.ChatArguments, pb.ChatRequest, SPREAD | OF_CALL),
    (given.EmbedArguments, pb.EmbedRequest, set()),
    (given.RerankArguments, pb.RerankRequest, set()),
    (given.ScoreArguments, pb.ScoreRequest, set()),
]
# Python type of a singular scalar field, by its C++ type.
PLAIN = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
}


@pytest.mark.parametrize(("typed", "message", "more"), TYPES, ids=lambda value: getattr(value, "__name__", ""))
def test_argument_types_have_the_fields_of_their_message(typed: Any, message: Any, more: set[str]) -> None:
    fields: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
    assert {*typed.__annotations__} == {*fields} - NOT_NAMED.get(message, set()) | more
    for name, hint in typing.get_type_hints(typed).items():
        field = fields.get(name)
        if field is None:
            continue
        kinds = {typing.get_origin(each) or each for each in typing.get_args(hint) or (hint,)} - {type(None)}
        if field.enum_type is not None:
            short = {name.lower() for name in field.enum_type.values_by_name}
            prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED").lower()
            literals = [each for each in typing.get_args(hint) if typing.get_origin(each) is typing.Literal]
            assert {prefix + each for literal in literals for each in typing.get_args(literal)} == short - {
                f"{prefix}unspecified"
            }
        elif field.message_type is None and not field.is_repeated:
            assert PLAIN[field.cpp_type] in kinds, name


def test_no_argument_is_a_field_of_two_messages() -> None:
    sampling, output = pb.SamplingParams.DESCRIPTOR.fields_by_name, pb.OutputOptions.DESCRIPTOR.fields_by_name
    own = {*pb.ChatRequest.DESCRIPTOR.fields_by_name, *pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    assert not {*sampling} & {*output}
    assert not ({*sampling} | {*output} | OF_CALL) & own


def test_connection_arguments_are_the_attributes_of_a_connection() -> None:
    fields = {field.name for field in dataclasses.fields(Connection)}
    assert {*given.ConnectionArguments.__annotations__} == fields - {"targets"}


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("method", "typed"),
    [
        ("chat", given.ChatArguments),
        ("chat_stream", given.ChatArguments),
        ("generate", given.GenerateArguments),
        ("generate_stream", given.GenerateArguments),
        ("embed", given.EmbedArguments),
        ("rerank", given.RerankArguments),
        ("score", given.ScoreArguments),
        ("render_prompt", given.PromptArguments),
        ("__init__", given.ConnectionArguments),
    ],
)
def test_signatures_list_every_argument(client: Any, method: str, typed: Any) -> None:
    shown = inspect.signature(getattr(client, method)).parameters
    assert {*typed.__annotations__} <= {*shown}
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown.values())


def sample(field: Any) -> Any:
    """A valid value of a field: a text, number, list or mapping, perhaps nested."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {5: 1.5}
    if field.message_type is not None:
        # One field is enough, and a oneof allows no second one.
        inner = field.message_type.fields[0]
        value: Any = {inner.name: sample(inner)}
    elif field.enum_type is not None:
        value = field.enum_type.values[1].name
    else:
        kinds = {bool: True, float: 0.5, str: "a", int: 3}
        value = kinds[PLAIN[field.cpp_type]]
    return [value, value] if field.is_repeated else value


def request_of(message: Any, named: Mapping[str, Any]) -> Message:
    """The request that the client makes of the arguments `named`."""
    makers: Mapping[Any, Any] = {
        pb.GenerateRequest: lambda: generate_request("p", named),
        pb.ChatRequest: lambda: chat_request("p", named),
        pb.EmbedRequest: lambda: embed_request(["p"], named),
        pb.RerankRequest: lambda: rerank_request("q", ["p"], named),
        pb.ScoreRequest: lambda: score_request(["p"], None, named),
    }
    made: Message = makers[message]()
    return made


@pytest.mark.parametrize(("typed", "message", "_more"), TYPES[-5:], ids=lambda value: getattr(value, "__name__", ""))
def test_every_argument_reaches_its_field(typed: Any, message: Any, _more: set[str]) -> None:
    for name in {*typed.__annotations__} - OF_CALL:
        place, field = request_of(message, {}), message.DESCRIPTOR.fields_by_name.get(name)
        for holder in ("sampling_params", "output_options"):
            if field is None and name in message.DESCRIPTOR.fields_by_name[holder].message_type.fields_by_name:
                found = message.DESCRIPTOR.fields_by_name[holder].message_type.fields_by_name[name]
                made = getattr(request_of(message, {name: sample(found)}), holder)
                assert name in [each.name for each, _ in made.ListFields()], name
        if field is not None:
            made = request_of(message, {name: sample(field)})
            assert made != place, name
            assert name in [each.name for each, _ in made.ListFields()], name


def checked(command: list[str]) -> list[int]:
    """The lines of bad_uses.py with a type checker's errors; fails if another file has errors."""
    environment = {**os.environ, "MYPYPATH": str(ROOT / "protos")}
    done = subprocess.run(command, cwd=USES, env=environment, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stdout.splitlines() if " error: " in line or "- error:" in line]
    assert complaints, done.stdout + done.stderr
    assert all("bad_uses.py" in line for line in complaints), complaints
    return sorted({int(line.split("bad_uses.py:")[1].split(":")[0]) for line in complaints})


def wrong_lines() -> list[int]:
    lines = (USES / "bad_uses.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")]


@pytest.mark.slow
def test_mypy_finds_wrong_arguments_and_no_others(tmp_path: Path) -> None:
    """Regression: type checkers accepted misspelled and mistyped arguments, because all were `Any`."""
    options = ["--strict", "--config-file", str(USES / "mypy.ini"), "--cache-dir", str(tmp_path)]
    assert checked([sys.executable, "-m", "mypy", *options, "good_uses.py", "bad_uses.py"]) == wrong_lines()


@pytest.mark.slow
def test_pyright_finds_wrong_arguments_and_no_others() -> None:
    pyright = ROOT / "build" / "pyright" / "node_modules" / ".bin" / "pyright"
    if not pyright.exists():
        pytest.skip("pyright is not installed: make setup does so where its package can be had")
    options = ["--pythonpath", sys.executable, "--project", str(USES / "pyrightconfig.json")]
    assert checked([str(pyright), *options]) == wrong_lines()


def test_prompt_arguments_are_fields_of_a_conversation() -> None:
    assert {*given.PromptArguments.__annotations__} < {*pb.ChatRequest.DESCRIPTOR.fields_by_name}


def test_key_of_a_call_replaces_that_of_the_connection() -> None:
    connection = Connection(["127.0.0.1:1"], api_key="ours", metadata={"x-a": "1"})
    assert connection.metadata_of() == (("authorization", "Bearer ours"), ("x-a", "1"))
    assert connection.metadata_of({"x-b": "2"}) == (("authorization", "Bearer ours"), ("x-a", "1"), ("x-b", "2"))
    assert connection.metadata_of({"authorization": "Bearer theirs"}) == (
        ("x-a", "1"),
        ("authorization", "Bearer theirs"),
    )
