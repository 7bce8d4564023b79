"""Random JSON Schemas of what is served, to be compared with an independent validator.

Those that nothing satisfies, or that the library refuses for their form, are among them: who uses these leaves them
out.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("a", "b", "c_d", "name", "x y", "é", 'q"')
_WORDS = ("red", "green", "", "a b", "ü", '"')
_PATTERNS = ("^[a-c]{1,4}$", "[0-9]", "^x", "ab|cd$", "^(foo|ba+r)$")
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")


def random_schema(rnd: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema with definitions that it may refer to, themselves included."""
    definitions = {name: _schema(rnd, depth - 1, ()) for name in ("p", "q")}
    made = _schema(rnd, depth, ("p", "q"))
    return {**made, "$defs": definitions} if "$ref" in repr(made) else made


def _schema(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _enum, _const, _simple]
    if depth > 0:
        kinds += [_object, _object, _object, _array, _array, _any_of, _all_of]
    if known and rnd.random() < 0.15:
        return {"$ref": f"#/$defs/{rnd.choice(known)}"}
    return rnd.choice(kinds)(rnd, depth, known)


def _maybe(rnd: random.Random, share: float, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if rnd.random() < share}


def _string(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    kind = rnd.randrange(3)
    if kind == 0:
        low = rnd.randrange(4)
        return {"type": "string", **_maybe(rnd, 0.6, minLength=low, maxLength=low + rnd.randrange(6))}
    if kind == 1:
        return {"type": "string", "pattern": rnd.choice(_PATTERNS)}
    return {"type": "string", "format": rnd.choice(_FORMATS)}


def _integer(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    low = rnd.randrange(-50, 50)
    bounds = {"minimum": low, "maximum": low + rnd.randrange(100)}
    if rnd.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rnd.randrange(100)}
    return {"type": "integer", **_maybe(rnd, 0.7, **bounds), **_maybe(rnd, 0.2, multipleOf=rnd.choice((2, 3, 7)))}


def _number(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    low = round(rnd.uniform(-20, 20), 2)
    return {"type": "number", **_maybe(rnd, 0.6, minimum=low, maximum=round(low + rnd.uniform(0, 40), 2))}


def _enum(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    values: list[Any] = [*rnd.sample(_WORDS, 3), rnd.randrange(100), None, True, [1, "x"], {"k": 2}]
    return {"enum": rnd.sample(values, rnd.randint(1, 5))}


def _const(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    return {"const": rnd.choice([1, -2.5, "v", None, False, [], {"a": [1]}])}


def _simple(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null"]
    return {"type": rnd.choice(kinds) if rnd.random() < 0.7 else rnd.sample(kinds, 2)}


def _object(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    names = rnd.sample(_NAMES, rnd.randint(0, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rnd, depth - 1, known) for name in names},
        "required": rnd.sample(names, rnd.randint(0, len(names))),
    }
    others = rnd.randrange(4)
    if others < 2:
        made["additionalProperties"] = False
    elif others == 2:
        made["additionalProperties"] = _schema(rnd, 0, known)
    if rnd.random() < 0.15:
        made["patternProperties"] = {"^z[0-9]$": _schema(rnd, 0, known)}
    if rnd.random() < 0.15:
        made["maxProperties"] = len(names) + rnd.randrange(3)
    return made


def _array(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array"}
    if rnd.random() < 0.3:
        made["prefixItems"] = [_schema(rnd, depth - 1, known) for _ in range(rnd.randint(1, 3))]
    made["items"] = False if rnd.random() < 0.15 else _schema(rnd, depth - 1, known)
    low = rnd.randrange(3)
    return {**made, **_maybe(rnd, 0.5, minItems=low, maxItems=low + rnd.randrange(4))}


def _any_of(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_schema(rnd, depth - 1, known) for _ in range(rnd.randint(2, 3))]}


def _all_of(rnd: random.Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    return {"allOf": [_object(rnd, depth - 1, known) for _ in range(2)]}
