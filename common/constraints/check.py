"""Checks constraints before anything is computed for them, and caches the results.

A grammar is compiled here as on a worker, but with a vocabulary of single bytes and less fuel, on a thread with a stack
for the deepest rules that MAX_GRAMMAR_BYTES can hold.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Final

from common.constraints import big_stack, faults, json_schema, lark, library
from common.constraints.forms import GRAMMAR, JSON_SCHEMA, REGEX, Constraint
from common.constraints.gbnf.reader import GbnfError
from common.constraints.subschemas import SchemaError
from common.errors import FieldViolation, InvalidFieldError
from common.limits import MAX_CHECKED_GRAMMAR_BYTES, MAX_CHECKED_GRAMMARS, MAX_GRAMMAR_BYTES

# Room for the optional leading blank.
_SPACE_BYTES: Final = 64
_VALID: Final = {
    JSON_SCHEMA: "a JSON Schema (2020-12) of keywords that are supported",
    REGEX: "a regular expression without look-around and back references",
    GRAMMAR: "a grammar in Lark or GBNF",
}
# Line in the canonical text where the grammar's own text begins.
_FIRST_LINE: Final = lark.HEADER.count("\n") + 1


class GrammarChecker:
    """Turns the constraints of one model's requests into grammars. Any thread may call it.

    Args:
        special: names of the special tokens, by id.
        eos_token_ids: the model's.
    """

    def __init__(self, special: Mapping[int, str], eos_token_ids: Collection[int]) -> None:
        self._special = dict(special)
        self._names = frozenset(special.values())
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab: library.Vocabulary | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str | FieldViolation] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached results: at most MAX_CHECKED_GRAMMAR_BYTES."""
        return self._num_bytes

    def known(self, constraint: Constraint, *, optional_space: bool, salt: bytes = b"") -> str | None:
        """The cached grammar of a constraint that was checked with the same salt; None if it was not.

        Raises:
            InvalidFieldError: the check had failed.
        """
        with self._lock:
            found = self._known.get(key := _key(constraint, optional_space, salt))
            if found is not None:
                self._known.move_to_end(key)
        return None if found is None else _granted(found)

    def check(self, constraint: Constraint, *, optional_space: bool, salt: bytes = b"") -> str:
        """The grammar of a constraint; can take a second or two.

        Args:
            constraint: of a request.
            optional_space: as for `lark.canonical`.
            salt: the cache salt in force. Requests with another salt do not find the result: its speed would reveal
                that somebody has used this constraint.

        Raises:
            InvalidFieldError: the constraint cannot be guaranteed; says why, and where.
        """
        if (found := self.known(constraint, optional_space=optional_space, salt=salt)) is not None:
            return found
        result: str | FieldViolation
        try:
            result = big_stack.begin(lambda: self._checked(constraint, optional_space), "grammar").result()
        except InvalidFieldError as error:
            (result,) = error.violations
        self._remember(_key(constraint, optional_space, salt), result)
        return _granted(result)

    def _remember(self, key: bytes, result: str | FieldViolation) -> None:
        with self._lock:
            if (before := self._known.pop(key, None)) is not None:
                self._num_bytes -= _size(before)
            self._known[key] = result
            self._num_bytes += _size(result)
            while len(self._known) > MAX_CHECKED_GRAMMARS or self._num_bytes > MAX_CHECKED_GRAMMAR_BYTES:
                self._num_bytes -= _size(self._known.popitem(last=False)[1])

    def _checked(self, constraint: Constraint, optional_space: bool) -> str:
        try:
            plain = lark.canonical(constraint, special=self._names)
            # The text with the optional blank always has a first token, which would hide some faults.
            text = lark.canonical(constraint, optional_space=True, special=self._names) if optional_space else plain
        except (SchemaError, lark.LarkError, GbnfError) as error:
            raise _refusal(constraint, str(error)) from None
        size, most = len(plain.encode()), MAX_GRAMMAR_BYTES - _SPACE_BYTES
        if size > most:
            raise _refusal(constraint, f"it becomes a grammar of {size} bytes; at most {most} are served")
        if fault := self._fault(plain):
            raise _refusal(constraint, self._described(constraint, fault))
        return text

    def _fault(self, text: str) -> str:
        """The library's objections to a grammar; "" for none."""
        if self._vocab is None:
            self._vocab = library.byte_vocabulary(self._special, self._eos_token_ids)
        return str(library.compiled(text, self._vocab, library.ADMISSION).get_error())

    def _described(self, constraint: Constraint, fault: str) -> str:
        if constraint.form == JSON_SCHEMA:
            schema = json_schema.parsed(constraint.texts[0])
            return str(faults.of_schema(schema, lambda text: self._fault(f"{lark.HEADER}start: %json {text}\n")))
        if constraint.form == REGEX:
            return faults.of_expression(fault)
        is_own_text = constraint.form == GRAMMAR and not lark.is_gbnf(constraint.texts[0])
        return faults.of_grammar(fault, _FIRST_LINE if is_own_text else None)


def _granted(result: str | FieldViolation) -> str:
    if isinstance(result, FieldViolation):
        raise InvalidFieldError(result.path, result.problem, result.valid)
    return result


def _refusal(constraint: Constraint, why: str) -> InvalidFieldError:
    return InvalidFieldError(constraint.path, f"cannot be served: {why}", _VALID.get(constraint.form, "another one"))


def _size(result: str | FieldViolation) -> int:
    """Bytes that a result takes."""
    if isinstance(result, FieldViolation):
        return sys.getsizeof(result.path) + sys.getsizeof(result.problem) + sys.getsizeof(result.valid)
    return sys.getsizeof(result)


def _key(constraint: Constraint, optional_space: bool, salt: bytes) -> bytes:
    digest = blake2b(f"{constraint.form}/{optional_space}".encode(), digest_size=16)
    for data in (salt, *(text.encode() for text in constraint.texts)):
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()
