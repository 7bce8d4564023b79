"""Sampling parameters: the fields of `SamplingParams` are the one table of them.

A field holds type and default, its `Parameter` the rest. Validation, the command line and both directions of both
protos are made from this table (`common/wire/sampling_protos.py`, `router/validation.py`,
`common/params/options/table.py`). A field of a proto has the name of the parameter.

The canonical form in receipts is made from the public proto by `canonical_params` of `fissile.receipts`: it fills in
every number and flag that is both a field of that proto and a parameter here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final, cast

import click

from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_TOKEN_SEQUENCES,
    MAX_TOP_LOGPROBS,
)
from common.params.logprobs import LOGPROBS_KINDS, PROCESSED, RAW, LogprobLayout
from common.params.options.option import Option
from common.params.options.types import Bias, Line
from common.params.sampling_checks import (
    UINT32_MAX,
    UINT64_MAX,
    Check,
    TokenSequences,
    bad_word_sequences,
    bias_pairs,
    flag,
    integer,
    real,
    texts,
    token_ids,
    token_sequences,
)

_ANSWERS: Final = ("generate", "chat")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Row of the table: everything about a sampling parameter besides its name, type and default.

    Attributes:
        check: returns the canonical value, or raises InvalidFieldError; None for checks that look at several fields.
        options: options of the command line that set it.
        most_entries: most entries of a list in a request; None for other parameters.
        shapes_distribution: True if it changes the distribution that tokens are drawn from.
        is_of_model: True if the model's generation_config.json may hold its default.
        is_output_option: True if the public contract has it in OutputOptions, not in SamplingParams.
        is_zero_default: True if 0 in a worker's message stands for the default, to save bytes.
    """

    check: Check | None
    options: tuple[Option, ...] = ()
    most_entries: int | None = None
    shapes_distribution: bool = False
    is_of_model: bool = False
    is_output_option: bool = False
    is_zero_default: bool = False


def _row(default: Any, check: Check | None, *options: Option, **columns: Any) -> Any:
    """Makes a field of `SamplingParams` with its row of the table."""
    return field(default=default, metadata={Parameter: Parameter(check, options, **columns)})


def _distribution_row(default: float, check: Check, option: Option, *, is_of_model: bool = False) -> Any:
    """Makes the field of a parameter that shapes the distribution of tokens."""
    return _row(default, check, option, shapes_distribution=True, is_of_model=is_of_model)


def _option(names: str, help: str, **columns: Any) -> Option:
    """Makes the row of an option of `fissile generate` and `chat`; the variable has the name of the option."""
    variable = names.split(maxsplit=1)[0].removeprefix("--").replace("-", "_").upper()
    return Option(names, f"FISSILE_{variable}", help, _ANSWERS, **columns)


def _list_option(names: str, parameter: str, help: str, **columns: Any) -> Option:
    """Makes the row of a repeatable option."""
    return _option(names, help, parameter=parameter, is_repeatable=True, **columns)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling: how tokens are chosen, when generation stops, and which logprobs are returned.

    `logit_bias` is given as a mapping and kept as pairs in the order of their ids. `bad_words` are texts, for code with
    a tokenizer; the engine reads `bad_words_token_ids`. `constraint`, which may be given as a mapping
    (`Constraint.of`), is for code that checks it; the engine reads `grammar` (common/constraints/lark.py).

    Examples:
        ```python
        greedy = SamplingParams(temperature=0.0, max_tokens=64)
        sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop_strings=("END",))
        digits = SamplingParams(max_tokens=8, constraint={"regex": "[0-9]+"})
        ```

    Raises:
        InvalidFieldError: a value is out of range; names the field and what would be valid.
    """

    # A comparison with NaN is false, so the ranges of all numbers refuse NaN.
    temperature: float = _distribution_row(
        1.0,
        real("a number from 0 (greedy) to 100", lambda value: 0.0 <= value <= 100.0),
        _option("--temperature", "Sampling temperature; 0 is greedy. Default: the model's, or 1.", type=click.FLOAT),
        is_of_model=True,
    )
    top_k: int = _distribution_row(
        0,
        integer(0, UINT32_MAX),
        _option(
            "--top-k", "Sample among the K most likely tokens; 0 is off. Default: the model's, or off.", type=click.INT
        ),
        is_of_model=True,
    )
    top_p: float = _distribution_row(
        1.0,
        real("a number above 0 and at most 1 (off)", lambda value: 0.0 < value <= 1.0),
        _option(
            "--top-p",
            "Sample among the most likely tokens whose probabilities sum to P, in (0, 1]. Default: the model's, "
            "or 1 (off).",
            type=click.FLOAT,
        ),
        is_of_model=True,
    )
    min_p: float = _distribution_row(
        0.0,
        real("a number from 0 (off) to 1", lambda value: 0.0 <= value <= 1.0),
        _option(
            "--min-p",
            "Drop tokens less likely than P times the most likely one, in [0, 1]. Default: the model's, or 0 (off).",
            type=click.FLOAT,
        ),
        is_of_model=True,
    )
    repetition_penalty: float = _distribution_row(
        1.0,
        real("a number above 0 and at most 100; 1 is off", lambda value: 0.0 < value <= 100.0),
        _option(
            "--repetition-penalty",
            "Divide the logits of tokens in prompt and answer. Default: the model's, or 1 (off).",
            type=click.FLOAT,
        ),
        is_of_model=True,
    )
    presence_penalty: float = _distribution_row(
        0.0,
        real("a number from -2 to 2; 0 is off", lambda value: -2.0 <= value <= 2.0),
        _option(
            "--presence-penalty",
            "Subtract once from the logits of tokens in the answer, in [-2, 2]. Default: 0 (off).",
            type=click.FLOAT,
        ),
    )
    frequency_penalty: float = _distribution_row(
        0.0,
        real("a number from -2 to 2; 0 is off", lambda value: -2.0 <= value <= 2.0),
        _option(
            "--frequency-penalty",
            "Subtract per occurrence from the logits of tokens in the answer, in [-2, 2]. Default: 0 (off).",
            type=click.FLOAT,
        ),
    )
    seed: int | None = _row(
        None,
        integer(0, UINT64_MAX),
        _option(
            "--seed",
            "Seed of the sampling: the same seed gives the same answer. Default: derived from the request id.",
            type=click.INT,
        ),
    )
    max_tokens: int = _row(
        64,
        integer(1, UINT32_MAX),
        _option(
            "--max-tokens",
            "Most tokens to generate. Default: the router's, or the rest of the context.",
            type=click.INT,
        ),
    )
    min_tokens: int = _row(
        0, integer(0, UINT32_MAX), _option("--min-tokens", "Fewest tokens to generate. Default: 0.", type=click.INT)
    )
    ignore_eos: bool = _row(
        False, flag, _option("--ignore-eos", "Continue past the model's end-of-sequence tokens.", is_flag=True)
    )
    stop_strings: tuple[str, ...] = _row(
        (),
        texts(MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES),
        _list_option(
            "--stop", "stop_strings", "Text that ends the answer. Repeatable; one a line in the variable.", type=Line()
        ),
        most_entries=MAX_STOP_STRINGS,
    )
    include_stop_string: bool = _row(False, flag)
    stop_token_ids: tuple[int, ...] = _row(
        (),
        token_ids(MAX_STOP_TOKEN_IDS),
        _list_option("--stop-token-id", "stop_token_ids", "Token id that ends the answer. Repeatable.", type=click.INT),
        most_entries=MAX_STOP_TOKEN_IDS,
    )
    stop_token_sequences: TokenSequences = _row((), token_sequences, most_entries=MAX_STOP_TOKEN_SEQUENCES)
    n: int = _row(1, integer(1, 128))
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = _row(
        (),
        bias_pairs,
        _list_option(
            "--logit-bias",
            "logit_bias",
            "Add BIAS, in [-100, 100], to the logit of token ID. Repeatable.",
            type=Bias(),
            metavar="ID=BIAS",
        ),
        most_entries=MAX_LOGIT_BIASES,
    )
    bad_words: tuple[str, ...] = _row(
        (),
        texts(MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
        _list_option(
            "--bad-word",
            "bad_words",
            "Text that the answer must not contain. Repeatable; one a line in the variable.",
            type=Line(),
        ),
        most_entries=MAX_BAD_WORDS,
    )
    bad_words_token_ids: TokenSequences = _row((), bad_word_sequences)
    allowed_token_ids: tuple[int, ...] = _row(
        (),
        token_ids(MAX_ALLOWED_TOKEN_IDS),
        _list_option(
            "--allowed-token-id",
            "allowed_token_ids",
            "Generate such token ids only, and end-of-sequence tokens. Repeatable. Default: all.",
            type=click.INT,
        ),
        most_entries=MAX_ALLOWED_TOKEN_IDS,
    )
    logprobs: int | None = _row(
        None,
        integer(0, MAX_TOP_LOGPROBS),
        _option(
            "--logprobs",
            "Show the logprob of each token, with the N most likely ones beside it, at most 20. Default: none.",
            type=click.INT,
        ),
        is_output_option=True,
    )
    logprob_token_ids: tuple[int, ...] = _row(
        (),
        token_ids(MAX_LOGPROB_TOKEN_IDS),
        _list_option(
            "--logprob-token-id",
            "logprob_token_ids",
            "Token id whose logprob is shown beside each token's. Repeatable.",
            type=click.INT,
        ),
        is_output_option=True,
    )
    logprobs_kind: str = _row(
        RAW,
        None,
        _option(
            "--logprobs-kind",
            "Distribution of the logprobs: the model's own, or the one that tokens are drawn from. Default: raw.",
            type=click.Choice(LOGPROBS_KINDS),
        ),
        is_output_option=True,
        is_zero_default=True,
    )
    prompt_logprobs: int | None = _row(
        None,
        integer(0, MAX_TOP_LOGPROBS),
        _option(
            "--prompt-logprobs",
            "Show the logprobs of the prompt's tokens, with the N most likely ones beside each. Default: none.",
            type=click.INT,
        ),
        is_output_option=True,
    )
    prompt_logprobs_start: int = _row(
        1,
        integer(1, UINT32_MAX),
        _option(
            "--prompt-logprobs-start",
            "First position of the prompt whose logprob is shown. Default: 1.",
            type=click.INT,
        ),
        is_output_option=True,
        is_zero_default=True,
    )
    num_drafts: int | None = _row(
        None,
        integer(0, UINT32_MAX),
        _option(
            "--num-drafts",
            "Verify at most N draft tokens per step; 0: none. The answer is the same. Default: the worker's choice.",
            type=click.INT,
        ),
    )
    constraint: Constraint | None = _row(
        None,
        None,
        _option("--json-schema", "The answer must be JSON that matches this schema.", metavar="FILE|TEXT"),
        _option("--json-object", "The answer must be a JSON object.", is_flag=True),
        _option("--regex", "The answer must match this regular expression."),
        _option("--grammar", "The answer must match this grammar, in Lark or GBNF.", metavar="FILE|TEXT"),
        _list_option(
            "--choice",
            "choices",
            "The answer must be one of such texts. Repeatable; one a line in the variable.",
            type=Line(),
        ),
    )
    grammar: str = _row("", None)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, default, check in _checks(kind):
            value = getattr(self, name)
            # Most values of most requests are the default, which is canonical.
            if value is not default and (checked := check(name, value)) is not value:
                object.__setattr__(self, name, checked)
        if self.logprobs is not None or self.prompt_logprobs is not None or self.logprob_token_ids:
            self._check_logprobs()
        if self.constraint is not None or self.grammar:
            self._check_constraint()

    def _check_constraint(self) -> None:
        if self.constraint is not None:
            object.__setattr__(self, "constraint", Constraint.of(self.constraint))
        if (size := len(self.grammar.encode())) > MAX_GRAMMAR_BYTES:
            valid = f"at most {MAX_GRAMMAR_BYTES} bytes of UTF-8"
            raise InvalidFieldError("sampling_params.grammar", f"has {size} bytes", valid)

    def _check_logprobs(self) -> None:
        if self.logprobs is None and self.prompt_logprobs is None:
            problem = "stands without logprobs"
            raise InvalidFieldError("sampling_params.logprob_token_ids", problem, "logprobs or prompt_logprobs")
        if self.logprobs_kind not in LOGPROBS_KINDS:
            valid = " or ".join(LOGPROBS_KINDS)
            raise InvalidFieldError("sampling_params.logprobs_kind", f"is {self.logprobs_kind!r}", valid)

    @property
    def logprob_layout(self) -> LogprobLayout:
        """Size of the rows with logprobs of generated tokens."""
        return LogprobLayout(self.logprobs or 0, len(self.logprob_token_ids))

    @property
    def prompt_logprob_layout(self) -> LogprobLayout:
        """Size of the rows with logprobs of the prompt."""
        return LogprobLayout(self.prompt_logprobs or 0, len(self.logprob_token_ids))

    @property
    def without_given_logprobs(self) -> SamplingParams:
        """The parameters without logprobs of the prompt."""
        if self.prompt_logprobs is None:
            return self
        # Ids without any logprobs are refused.
        ids = self.logprob_token_ids if self.logprobs is not None else ()
        return replace(self, prompt_logprobs=None, prompt_logprobs_start=1, logprob_token_ids=ids)

    @property
    def wants_logprobs(self) -> bool:
        """True if logprobs are asked for, of generated tokens or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def processes_logprobs(self) -> bool:
        """True if logprobs of generated tokens are those of the distribution that they are drawn from."""
        return self.logprobs is not None and self.logprobs_kind == PROCESSED

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """True if a penalty changes the logits of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` in its canonical form: pairs in the order of their ids."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def steers(self) -> bool:
        """True if something changes the logits of every token: penalties, a bias or masks."""
        is_masked = self.bad_words_token_ids or self.allowed_token_ids or self.grammar
        return self.penalized or bool(self.logit_bias or is_masked)


@cache
def _checks(kind: Any) -> tuple[tuple[str, Any, Check], ...]:
    """Name, default and check of each field with a check of its own."""
    rows = ((each.name, each.default, each.metadata[Parameter].check) for each in fields(kind))
    return tuple(row for row in rows if row[2] is not None)


PARAMETERS: Final[Mapping[str, Parameter]] = {each.name: each.metadata[Parameter] for each in fields(SamplingParams)}
"""The table, by the names of the parameters."""
DISTRIBUTION_FIELDS: Final = tuple(name for name, row in PARAMETERS.items() if row.shapes_distribution)
"""Parameters that shape the distribution that tokens are drawn from."""
LOGPROB_FIELDS: Final = tuple(name for name, row in PARAMETERS.items() if row.is_output_option)
"""Parameters about logprobs, which the public contract has in OutputOptions."""


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Makes the values of absent parameters: those of the model's `generation_config.json`, else the table's.

    transformers and vLLM read the same parameters from that file, and its lengths too. `do_sample` has no effect: a
    greedy request says `temperature` 0. An invalid value is left out: a checkpoint's odd value must not fail every
    request.
    """
    params = SamplingParams()
    for name in (name for name, row in PARAMETERS.items() if row.is_of_model):
        value = generation_config.get(name)
        kind = int if isinstance(getattr(params, name), int) else (int, float)
        if isinstance(value, kind) and not isinstance(value, bool):
            given: dict[str, Any] = {name: value}
            with contextlib.suppress(InvalidFieldError):
                params = replace(params, **given)
    return params
