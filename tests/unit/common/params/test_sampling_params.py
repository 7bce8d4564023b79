"""Refused sampling parameters, and the model's defaults from generation_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import InvalidFieldError
from common.params.sampling_checks import float32
from common.params.sampling_params import SamplingParams, model_defaults


def test_absent_generation_config_gives_defaults() -> None:
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
def test_valid_generation_config_value_is_used(name: str, value: Any) -> None:
    assert model_defaults({name: value}) == SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1, None, "much", True, [1], float("nan")])
def test_invalid_generation_config_value_is_ignored(name: str, value: Any) -> None:
    assert model_defaults({name: value}) == SamplingParams()


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "presence_penalty", "seed", "n", "do_sample"])
def test_other_generation_config_keys_are_ignored(name: str) -> None:
    assert model_defaults({name: 1}) == SamplingParams()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (float32(-0.1), "is -0.1;"),
        (-0.1, "is -0.1;"),
        (float32(1.0000001), "is 1.0000001;"),
        (float32(16777216.0), "is 16777216.0;"),
        (float("nan"), "is nan;"),
        (float("inf"), "is inf;"),
    ],
)
def test_refused_number_is_printed_as_written(sent: float, said: str) -> None:
    """Regression: the error said "min_p is -0.10000000149011612" for a request with -0.1."""
    with pytest.raises(InvalidFieldError, match=said):
        SamplingParams(min_p=sent)


def test_integers_of_another_kind_become_integers() -> None:
    """Regression: one numpy integer failed the step of all requests with a TypeError."""
    kinds: dict[str, Any] = {
        "seed": np.uint64(2**63),
        "max_tokens": np.int64(3),
        "min_tokens": np.int8(1),
        "top_k": np.uint32(4),
    }
    ids: dict[str, Any] = {"stop_token_ids": (np.int64(5),), "stop_token_sequences": ((np.int64(6),),)}
    params = SamplingParams(**kinds, **ids)
    assert params == SamplingParams(
        seed=2**63, max_tokens=3, min_tokens=1, top_k=4, stop_token_ids=(5,), stop_token_sequences=((6,),)
    )
    values = [*(getattr(params, name) for name in kinds), *params.stop_token_ids, *params.stop_token_sequences[0]]
    assert {type(value) for value in values} == {int}
