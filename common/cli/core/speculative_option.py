"""The option for speculation: a JSON object with the fields of SpeculativeConfig."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import click

from common.errors import InvalidFieldError
from common.files import parse_json
from common.params.config_parts import SpeculativeConfig

_EXAMPLE: Final = '{"method": "ngram", "num_speculative_tokens": 4}'
_FIELDS: Final = tuple(field.name for field in fields(SpeculativeConfig))
_REQUIRED: Final = ("method", "num_speculative_tokens")


def speculative_config(text: str) -> SpeculativeConfig:
    """The config that a JSON object says.

    Raises:
        ValueError: it is none, or a field is missing, unknown or out of range; one line.
    """
    try:
        given = parse_json(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{text!r} is not a JSON object; use for example '{_EXAMPLE}'")
    for name in given:
        if name not in _FIELDS:
            raise ValueError(f"{name} is unknown; valid: {', '.join(_FIELDS)}")
    for name in _REQUIRED:
        if name not in given:
            raise ValueError(f"{name} is missing; use for example '{_EXAMPLE}'")
    try:
        return SpeculativeConfig(**given)
    except InvalidFieldError as error:
        raise ValueError(str(error)) from None


class Speculation(click.ParamType[SpeculativeConfig]):
    """Speculation, from a JSON object."""

    name = "speculation"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> SpeculativeConfig:
        """Reads the text of an option."""
        if isinstance(value, SpeculativeConfig):
            return value
        try:
            return speculative_config(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SpeculationText(click.ParamType[str]):
    """Speculation as `Speculation` reads it, kept as it was written for the child process that does."""

    name = Speculation.name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the text of an option."""
        Speculation().convert(value, param, ctx)
        return str(value)
