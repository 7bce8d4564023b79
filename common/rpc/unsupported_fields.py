"""Refuses request fields that are not served, so that no field is accepted and then ignored.

A method lists the fields it serves, as dotted paths (`sampling_params.temperature`). So a field that is new in the
protos is refused until a method serves it and lists it. A field that this version's protos do not have, which a newer
client may send, is refused too, by its number, at any depth.

Messages between routers and workers (the Session's frames, GetWorker, GetTokenizer) may have fields that the other side
does not know. There both sides negotiate a version (Hello's `proto_minor`), so that routers and workers of two versions
work together while a fleet is updated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Set
from typing import Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import InvalidFieldError, UnservedFieldError
from common.limits import MAX_LIST_ENTRIES

# Messages of this package (Struct, Duration, ...) are values: served or refused as a whole.
_WELL_KNOWN: Final = "google.protobuf."
# Above this size unknown fields are refused without their numbers: there may be a million of them.
_NAMED_BYTES: Final = 4096


def refuse_unserved(message: Message, served: Set[str] = frozenset()) -> None:
    """Checks a client's request: every field of `message` and of the messages in it.

    Args:
        message: a request; unknown fields are discarded from it.
        served: as for `refuse_unlisted`.

    Raises:
        UnservedFieldError: a field is set that is not served, or that this version does not know.
        InvalidFieldError: as `refuse_unlisted`.
    """
    refuse_unlisted(message, served)
    _refuse_unknown(message)


def refuse_unlisted(message: Message, served: Set[str], *, prefix: str = "") -> None:
    """Checks every set field of `message` and of the messages in it, apart from fields that this version does not know.

    Args:
        message: a request.
        served: paths of the served fields, including those of messages; for a map field, its own path.
        prefix: path of `message` itself, for a message that is checked alone: `seqs.params.`.

    Raises:
        UnservedFieldError: a field is set that is not served.
        InvalidFieldError: an enum field has a value that this version does not know, or a list of messages is too long
            to check.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        if path not in served:
            raise UnservedFieldError(path)
        if _has_own_fields(field):
            if field.is_repeated and len(value) > MAX_LIST_ENTRIES:
                raise InvalidFieldError(path, f"has {len(value)} entries", f"at most {MAX_LIST_ENTRIES}")
            for item in value if field.is_repeated else (value,):
                refuse_unlisted(item, served, prefix=f"{path}.")
        elif field.enum_type is not None:
            _check_enum(path, field.enum_type, value if field.is_repeated else (value,))


def _refuse_unknown(message: Message) -> None:
    # Encoding twice is quicker than checking each of the million fields that a message can hold.
    given = message.SerializePartialToString()
    message.DiscardUnknownFields()
    extra = len(given) - message.ByteSize()
    if not extra:
        return
    path = f"{extra} bytes of unknown fields"
    if extra <= _NAMED_BYTES:
        path = next(_unknown_paths(type(message).FromString(given)), path)
    raise UnservedFieldError(path)


def _unknown_paths(message: Message, prefix: str = "") -> Iterator[str]:
    """Paths of unknown fields, by number."""
    unknown = UnknownFieldSet(message)
    yield from (f"{prefix}{unknown[i].field_number}" for i in range(len(unknown)))
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None:
            continue
        is_map = kind.GetOptions().map_entry
        items = value.values() if is_map else value if field.is_repeated else (value,)
        for item in items:
            if isinstance(item, Message):
                yield from _unknown_paths(item, f"{prefix}{field.name}.")


def field_paths(descriptor: Descriptor, prefix: str = "", above: tuple[Descriptor, ...] = ()) -> Iterator[str]:
    """Dotted paths of all fields that a message can have, depth first. A type within itself is not entered again."""
    for field in descriptor.fields:
        path = prefix + field.name
        yield path
        inner = field.message_type
        if _has_own_fields(field) and inner is not None and inner not in (*above, descriptor):
            yield from field_paths(inner, f"{path}.", (*above, descriptor))


@functools.cache
def _has_own_fields(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and not kind.GetOptions().map_entry and not kind.full_name.startswith(_WELL_KNOWN)


def _check_enum(path: str, enum: EnumDescriptor, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number not in enum.values_by_number:
            names = ", ".join(v.name for n, v in sorted(enum.values_by_number.items()) if n)
            raise InvalidFieldError(path, f"is {number}", names)
