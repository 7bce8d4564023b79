"""The speculation option: valid values reach the config, others are refused in one line."""

from __future__ import annotations

import click
import pytest

from common.config import SpeculativeConfig
from common.params.options.types import AsWritten, Speculation

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def test_speculative_config_is_read() -> None:
    read = Speculation().convert('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}', None, None)
    assert read == SpeculativeConfig(5, "ngram", prompt_lookup_max=3, prompt_lookup_min=2)
    assert Speculation().convert(read, None, None) is read
    assert AsWritten(Speculation()).convert(NGRAM, None, None) == NGRAM


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not a JSON object; use for example '{\"method\""),
        ("ngram", "'ngram' is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing; use for example"),
        ('{"num_speculative_tokens": 3}', "method is missing; use for example"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "k": 1}',
            "k is unknown; valid: num_speculative_tokens, method, model, prompt_lookup_max, prompt_lookup_min, "
            "prompt_lookup_finished, adaptive",
        ),
        (
            '{"method": "magic", "num_speculative_tokens": 3}',
            "speculative_config.method is 'magic'; valid: ngram, mtp",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 0}',
            "speculative_config.num_speculative_tokens is 0; valid: 1 to 16",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": "4"}',
            "speculative_config.num_speculative_tokens is '4'; valid: of type int",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 9}',
            "speculative_config.prompt_lookup_min is 9; valid: 1 to prompt_lookup_max, 4",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_finished": -1}',
            "speculative_config.prompt_lookup_finished is -1; valid: 0 to 268435456",
        ),
        (
            '{"method": "mtp", "num_speculative_tokens": 4, "prompt_lookup_finished": 5}',
            "speculative_config.prompt_lookup_finished is 5; valid: 0 with method mtp",
        ),
    ],
)
@pytest.mark.parametrize("option", [Speculation(), AsWritten(Speculation())])
def test_invalid_speculative_option_is_refused(option: click.ParamType[object], text: str, problem: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        option.convert(text, None, None)
    assert caught.value.message.startswith(problem) or problem in caught.value.message
    assert "\n" not in caught.value.message
