"""The model's own defaults: what its generation_config.json says, as far as it is valid."""

from __future__ import annotations

from typing import Any

import pytest

from common.sampling_params import SamplingParams, model_defaults


def test_an_absent_file_changes_nothing() -> None:
    assert model_defaults({}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("temperature", 0),
        ("top_k", 7),
        ("top_p", 0.5),
        ("min_p", 0.25),
        ("repetition_penalty", 2),
    ],
)
def test_a_valid_value_is_taken(name: str, value: Any) -> None:
    assert model_defaults({name: value}) == SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1, None, "much", True, [1], float("nan")])
def test_an_odd_value_is_left_out(name: str, value: Any) -> None:
    assert model_defaults({name: value}) == SamplingParams()


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "presence_penalty", "seed", "n", "do_sample"])
def test_nothing_else_is(name: str) -> None:
    assert model_defaults({name: 1}) == SamplingParams()
