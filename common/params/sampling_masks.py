"""Checks of biases and masks against a model: ids must exist, and a token must be left to generate."""

from __future__ import annotations

from collections.abc import Set

from common.errors import InvalidFieldError
from common.params.sampling_params import SamplingParams


def check_bias_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuses biases of ids that the model does not have.

    Raises:
        InvalidFieldError: names one.
    """
    for token, _ in params.biases:
        if token >= vocab_size:
            path = f"sampling_params.logit_bias[{token}]"
            raise InvalidFieldError(path, "is of no token", f"ids from 0 to {vocab_size - 1}")


def check_tokens_left(params: SamplingParams, num_ids: int, eos_token_ids: Set[int]) -> None:
    """Refuses parameters whose masks may leave no token to generate somewhere in an answer.

    The last token of each bad word counts as masked, whatever comes before it, because the answer is not known yet.

    Args:
        params: of a request.
        num_ids: ids below it can be generated.
        eos_token_ids: the model's.

    Raises:
        InvalidFieldError: nothing may be left.
    """
    masked = {ids[-1] for ids in params.bad_words_token_ids}
    if params.min_tokens:
        masked.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    allowed: Set[int] = frozenset(params.allowed_token_ids) | eos_token_ids
    if params.allowed_token_ids:
        left = any(token < num_ids for token in allowed - masked)
    else:
        left = len(masked) < num_ids or not masked.issuperset(range(num_ids))
    if not left:
        name = "allowed_token_ids" if params.allowed_token_ids else "bad_words"
        valid = "a token that ends no bad word and, with min_tokens, stops nothing"
        raise InvalidFieldError(f"sampling_params.{name}", "leaves no token", valid)
