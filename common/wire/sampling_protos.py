"""Sampling parameters from and to the messages of both protos, whose fields have the names of the parameters.

A router sends canonical parameters to its workers, with every field set; text and seeds stay with the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.constraints.forms import CHOICES, FORMS, JSON_OBJECT, Constraint
from common.errors import InvalidFieldError
from common.params.sampling_params import PARAMETERS, SamplingParams

_Read: TypeAlias = Callable[[Any], Any]
"""From the value of a message's field to that of a parameter."""
_DEFAULTS: Final = SamplingParams()


def _of_proto(descriptor: Descriptor) -> tuple[str, ...]:
    """Parameters that are fields of a message."""
    return tuple(name for name in PARAMETERS if name in descriptor.fields_by_name)


def _paths(descriptor: Descriptor) -> frozenset[str]:
    """Paths of a message's fields that are parameters, and of the fields of these."""
    names = _of_proto(descriptor)
    nested = {f"{name}.ids" for name in names if _has_type(descriptor.fields_by_name[name], "TokenIds")}
    forms = {f"constraint.{form}" for form in FORMS} | {"constraint.choices.texts"}
    return frozenset({*names, *nested, *(forms if "constraint" in names else ())})


def _has_type(each: FieldDescriptor, message: str) -> bool:
    return each.message_type is not None and each.message_type.name == message


SAMPLING_FIELDS: Final = _paths(wpb.SamplingParams.DESCRIPTOR)
"""Paths of the fields of a worker's message."""
PUBLIC_FIELDS: Final = _paths(pb.SamplingParams.DESCRIPTOR)
"""Paths of the parameters in SamplingParams of the public contract."""
OUTPUT_FIELDS: Final = _of_proto(pb.OutputOptions.DESCRIPTOR)
"""Parameters in OutputOptions of the public contract."""


def _constraint(message: pb.Constraint) -> Constraint:
    """Reads a constraint.

    Raises:
        InvalidFieldError: it has no form, or one of a wrong size.
    """
    form = message.WhichOneof("form")
    if form is None:
        raise InvalidFieldError("sampling_params.constraint", "is empty", f"one of {', '.join(FORMS)}")
    content = getattr(message, form)
    if form == JSON_OBJECT:
        return Constraint.of({form: content})
    return Constraint(form, tuple(content.texts) if form == CHOICES else (content,))


def _sequences(messages: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(message.ids) for message in messages)


def _same(value: Any) -> Any:
    return value


def _reader(each: FieldDescriptor) -> _Read:
    """Returns the conversion of one field's value."""
    if each.message_type is not None:
        if each.message_type.GetOptions().map_entry:
            return _same
        structured: dict[str, _Read] = {"TokenIds": _sequences, "Constraint": _constraint}
        return structured[each.message_type.name]
    if each.enum_type is not None:
        names = {value.number: value.name for value in each.enum_type.values if value.number}
        kinds = {number: name.removeprefix("LOGPROBS_KIND_").lower() for number, name in names.items()}
        return kinds.get
    if each.is_repeated:
        return tuple
    return _same


def _writer(each: FieldDescriptor) -> _Read:
    """Returns the conversion of a parameter to one field's value."""
    if each.message_type is not None:
        if each.message_type.GetOptions().map_entry:
            return dict
        return lambda sequences: [wpb.TokenIds(ids=ids) for ids in sequences]
    if each.enum_type is not None:
        return lambda text: f"LOGPROBS_KIND_{text.upper()}"
    return _same


def _readers(descriptor: Descriptor) -> Mapping[str, tuple[_Read, bool]]:
    """Conversions of a message's parameters, each with whether the field may be absent, by name."""
    found = {name: descriptor.fields_by_name[name] for name in _of_proto(descriptor)}
    return {name: (_reader(each), each.has_presence) for name, each in found.items()}


_WORKER: Final = _readers(wpb.SamplingParams.DESCRIPTOR)
_WRITERS: Final = {name: _writer(wpb.SamplingParams.DESCRIPTOR.fields_by_name[name]) for name in _WORKER}
_PUBLIC: Final = _readers(pb.SamplingParams.DESCRIPTOR)
_OUTPUT: Final = _readers(pb.OutputOptions.DESCRIPTOR)


def _given(message: Message, readers: Mapping[str, tuple[_Read, bool]]) -> dict[str, Any]:
    """Reads the parameters that a message has; a list or a map without entries counts as given."""
    return {
        name: read(getattr(message, name))
        for name, (read, may_be_absent) in readers.items()
        if not may_be_absent or message.HasField(name)
    }


def given_sampling(message: pb.SamplingParams) -> dict[str, Any]:
    """Reads the parameters that a request has.

    Raises:
        InvalidFieldError: the constraint has no form, or one of a wrong size.
    """
    return _given(message, _PUBLIC)


def given_output(message: pb.OutputOptions) -> dict[str, Any]:
    """Reads the parameters that a request has among its output options."""
    given = _given(message, _OUTPUT)
    return {name: value for name, value in given.items() if value is not None}


def sampling_to_proto(params: SamplingParams) -> wpb.SamplingParams:
    """Makes the parameters of a sequence for a worker."""
    given = {}
    for name, write in _WRITERS.items():
        value = getattr(params, name)
        if value is not None and not (PARAMETERS[name].is_zero_default and value == getattr(_DEFAULTS, name)):
            given[name] = write(value)
    return wpb.SamplingParams(**given)


def sampling_from_proto(message: wpb.SamplingParams) -> SamplingParams:
    """Reads the parameters of a sequence on the worker.

    Raises:
        InvalidFieldError: one is out of range; named as a field of `sampling_params`.
    """
    given = _given(message, _WORKER)
    for name, row in PARAMETERS.items():
        if row.is_zero_default and not given.get(name, True):
            del given[name]
    return SamplingParams(**given)
