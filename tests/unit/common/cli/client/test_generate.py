"""The request that `fissile generate` builds from its options."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from fissile.client.calls import generate_request

from common.cli.client.generate import given
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.params.options.types import Bias


def test_masks_and_biases_are_sent() -> None:
    options = {"logit_bias": ((42, -1.5), (7, 3.0)), "bad_words": ("no", "never"), "allowed_token_ids": (42, 5)}
    sampling = given({**options, "seed": None, "stop_strings": ()})
    sent = generate_request("hi", sampling).sampling_params
    assert dict(sent.logit_bias) == {42: -1.5, 7: 3.0}
    assert (list(sent.bad_words), list(sent.allowed_token_ids)) == (["no", "never"], [42, 5])
    assert not sent.HasField("seed")


def test_too_large_logit_bias_is_refused() -> None:
    with pytest.raises(CommandError, match=r"logit_bias\[42\] is 101\.0"):
        given({"logit_bias": ((42, 101.0),)})


def test_logit_bias_is_an_id_and_a_number() -> None:
    assert Bias().convert("42=-1.5", None, None) == (42, -1.5)
    for text in ("42", "=1", "a=1", "42=b", "4.2=1"):
        with pytest.raises(click.BadParameter, match="is not a bias"):
            Bias().convert(text, None, None)


@pytest.mark.parametrize(
    ("variable", "name"), [("STOP", "stop_strings"), ("BAD_WORD", "bad_words"), ("CHOICE", "choices")]
)
def test_texts_of_a_variable_have_blanks(variable: str, name: str) -> None:
    read: dict[str, Any] = {}

    @click.command()
    @options("generate")
    def command(**values: Any) -> None:
        read.update(values)

    ran = CliRunner().invoke(command, env={f"FISSILE_{variable}": "a cat\nno"})
    assert ran.exit_code == 0, ran.output
    assert read[name] == ("a cat", "no")
