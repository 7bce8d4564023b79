"""Nothing is accepted and ignored: a request's set fields must be on the list of those that are served.

The list is of dotted paths (`sampling_params.temperature`), so a field that is new in the protos is refused until
somebody serves it and adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidFieldError, UnservedFieldError
from common.limits import MAX_LIST_ENTRIES

# Messages of this package (Struct, Duration, ...) are values: served or not as a whole.
_WELL_KNOWN: Final = "google.protobuf."


def refuse_unserved(message: Message, served: Set[str], *, prefix: str = "") -> None:
    """Checks every set field of `message` and of the messages in it.

    Args:
        message: a request.
        served: paths of the fields that are served, those of messages included; of a map field, its own path.
        prefix: path of `message` itself, for fields of a message that is checked alone: `seqs.params.`.

    Raises:
        UnservedFieldError: a field is set that is not served.
        InvalidFieldError: an enum field has a value that this version does not know, or a list of messages is too long
            to be looked at.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        if path not in served:
            raise UnservedFieldError(path)
        if _has_own_fields(field):
            if field.is_repeated and len(value) > MAX_LIST_ENTRIES:
                raise InvalidFieldError(path, f"has {len(value)} entries", f"at most {MAX_LIST_ENTRIES}")
            for item in value if field.is_repeated else (value,):
                refuse_unserved(item, served, prefix=f"{path}.")
        elif field.enum_type is not None:
            _check_enum(path, field.enum_type, value if field.is_repeated else (value,))


def field_paths(descriptor: Descriptor, prefix: str = "", above: tuple[Descriptor, ...] = ()) -> Iterator[str]:
    """Dotted paths of all fields that a message can have, depth first; a type inside itself is not entered again."""
    for field in descriptor.fields:
        path = prefix + field.name
        yield path
        inner = field.message_type
        if _has_own_fields(field) and inner is not None and inner not in (*above, descriptor):
            yield from field_paths(inner, f"{path}.", (*above, descriptor))


def _has_own_fields(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and not kind.GetOptions().map_entry and not kind.full_name.startswith(_WELL_KNOWN)


def _check_enum(path: str, enum: EnumDescriptor, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number not in enum.values_by_number:
            names = ", ".join(v.name for n, v in sorted(enum.values_by_number.items()) if n)
            raise InvalidFieldError(path, f"is {number}", names)
