"""Checks the tools of a conversation, and converts them for chat templates and for the reader of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from common.json_text import JsonError, json_value
from common.limits import MAX_TOOLS
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.schema_types import types_of


def json_object(path: str, text: str) -> dict[str, Any]:
    """A JSON object as Python values, in their order.

    Raises:
        InvalidFieldError: the text is no JSON object, or `json_value` refuses it; the error names the place.
    """
    try:
        value = json_value(text)
    except JsonError as error:
        raise InvalidFieldError(path, str(error), "a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidFieldError(path, "is another JSON value", "a JSON object")
    return value


_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VALID_NAME: Final = "1 to 64 letters, digits, `_`, `-` and `.`"
# Most characters of a name in an error.
_QUOTED: Final = 64
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


def are_in_force(request: pb.ChatRequest) -> bool:
    """True if the model may call a tool."""
    return bool(request.tools) and request.tool_choice.mode != pb.TOOL_MODE_NONE


def ends_with_first_call(request: pb.ChatRequest) -> bool:
    """True if the answer ends with its first call."""
    return are_in_force(request) and request.HasField("parallel_tool_calls") and not request.parallel_tool_calls


def check_tools(request: pb.ChatRequest) -> None:
    """Checks names, the tool choice and messages with calls: everything that needs neither a model nor JSON.

    Raises:
        ApiError: a value is not served or not valid.
    """
    _check_declared(request)
    _check_choice(request)
    if ends_with_first_call(request) and request.sampling_params.min_tokens:
        valid = "no min_tokens: the answer ends with its first call"
        raise InvalidFieldError("sampling_params.min_tokens", "stands beside parallel_tool_calls", valid)
    for i, message in enumerate(request.messages):
        _check_message(f"messages[{i}]", message)


def _check_declared(request: pb.ChatRequest) -> None:
    if len(request.tools) > MAX_TOOLS:
        raise InvalidFieldError("tools", f"has {len(request.tools)} entries", f"at most {MAX_TOOLS}")
    seen = set[str]()
    for i, tool in enumerate(request.tools):
        _check_name(f"tools[{i}].name", tool.name)
        if tool.name in seen:
            raise InvalidFieldError(f"tools[{i}].name", f"is {tool.name!r} again", "a name of its own")
        seen.add(tool.name)


def _check_choice(request: pb.ChatRequest) -> None:
    for name in ("tool_choice", "parallel_tool_calls"):
        if request.HasField(name) and not request.tools:
            raise InvalidFieldError(name, "stands without tools", "tools")
    choice = request.tool_choice
    if choice.WhichOneof("choice") == "name" and choice.name not in {tool.name for tool in request.tools}:
        raise InvalidFieldError("tool_choice.name", f"is {choice.name[:_QUOTED]!r}", "the name of one of the tools")


def _check_message(path: str, message: pb.ChatMessage) -> None:
    role = message.role[:_QUOTED]
    for name in ("reasoning", "tool_calls"):
        if getattr(message, name) and message.role != "assistant":
            raise InvalidFieldError(f"{path}.{name}", f"stands beside role {role!r}", "role assistant, or none")
    if message.tool_call_id and message.role != "tool":
        raise InvalidFieldError(f"{path}.tool_call_id", f"stands beside role {role!r}", "role tool, or none")
    for j, call in enumerate(message.tool_calls):
        _check_name(f"{path}.tool_calls[{j}].name", call.name)


def _check_name(path: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidFieldError(path, f"is {name[:_QUOTED]!r}", _VALID_NAME)


def template_tools(request: pb.ChatRequest) -> list[dict[str, Any]] | None:
    """Converts the tools of a request to transformers' form; None if no tool may be called.

    Raises:
        InvalidFieldError: a schema is not a JSON object.
    """
    if not are_in_force(request):
        return None
    return [_template_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]


def _template_tool(path: str, tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    schema = json_object(f"{path}.parameters_json", tool.parameters_json) if tool.parameters_json else None
    function["parameters"] = {**_NO_PARAMETERS} if schema is None else schema
    return {"type": "function", "function": function}


def template_calls(path: str, message: pb.ChatMessage) -> list[dict[str, Any]]:
    """Converts the calls of a message to transformers' form.

    Raises:
        InvalidFieldError: arguments are not a JSON object.
    """
    calls = []
    for j, call in enumerate(message.tool_calls):
        arguments = json_object(f"{path}.tool_calls[{j}].arguments_json", call.arguments_json or "{}")
        function = {"name": call.name, "arguments": arguments}
        calls.append({"type": "function", **({"id": call.id} if call.id else {}), "function": function})
    return calls


def declared(tools: list[dict[str, Any]]) -> ToolSchemas:
    """Converts tools for the reader of answers, with the types of arguments resolved through references.

    Args:
        tools: result of `template_tools`.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        parameters = tool["function"]["parameters"]
        properties = parameters.get("properties")
        schemas[tool["function"]["name"]] = {
            name: {"type": [*types]} if (types := types_of(schema, parameters)) else schema
            for name, schema in (properties.items() if isinstance(properties, dict) else ())
        }
    return ToolSchemas(schemas)
