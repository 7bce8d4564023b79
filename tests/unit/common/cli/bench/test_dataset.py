"""Data sets: the requests that lines become, and the errors for invalid lines."""

from __future__ import annotations

import pytest

from common.cli.bench.dataset import DatasetError, read_dataset
from common.cli.bench.workload import Work
from common.params.options.types import Lengths


def test_data_set_has_three_kinds_of_prompts() -> None:
    lines = [
        '{"prompt": "Once", "max_tokens": 7}\n',
        "\n",
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
        '{"token_ids": [1, 2, 3]}',
    ]
    assert read_dataset(lines, Lengths(5, 5), 0).entries == [
        Work(7, text="Once"),
        Work(5, messages=({"role": "user", "content": "hi"},)),
        Work(5, token_ids=(1, 2, 3)),
    ]


def test_surrogate_halves_become_one_character() -> None:
    assert read_dataset(['{"prompt": "\\ud83d\\ude00"}'], Lengths(1, 1), 0).entries == [
        Work(1, text="\N{GRINNING FACE}")
    ]


def test_lengths_of_answers_are_drawn_by_the_seed() -> None:
    lines = ['{"prompt": "a"}'] * 200
    first, again, other = ([w.output_tokens for w in read_dataset(lines, Lengths(1, 9), s).entries] for s in (0, 0, 1))
    assert first == again != other
    assert set(first) == set(range(1, 10))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not an object"),
        ("{}", "line 2 has 0 prompts"),
        ('{"prompt": "a", "token_ids": [1]}', "line 2 has 2 prompts"),
        ('{"prompt": "a", "temprature": 1}', "line 2 names 'temprature'"),
        ('{"prompt": ""}', "line 2: prompt is empty or of a wrong type"),
        ('{"prompt": 3}', "line 2: prompt is empty or of a wrong type"),
        ('{"token_ids": [-1]}', "line 2: token_ids is empty or of a wrong type"),
        ('{"token_ids": [true]}', "line 2: token_ids is empty or of a wrong type"),
        ('{"prompt": "a\\ud800"}', "line 2: prompt has \\ud800, half of a character; valid: text in UTF-8"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "line 2: messages has \\udfff, half of a character"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages is empty or of a wrong type"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0; valid: a number from 1"),
        ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens is True"),
    ],
)
def test_invalid_data_set_line_is_named(line: str, said: str) -> None:
    with pytest.raises(DatasetError) as refused:
        read_dataset(['{"prompt": "fine"}', line], Lengths(1, 1), 0)
    assert str(refused.value).startswith(said)


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(DatasetError, match="the data set has no request; valid: lines of"):
        read_dataset(["\n", ""], Lengths(1, 1), 0)
