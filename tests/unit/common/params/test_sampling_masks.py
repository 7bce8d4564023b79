"""Accepted masks leave at least one token after every output, checked exhaustively."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidFieldError
from common.params.sampling_masks import check_bias_ids, check_tokens_left
from common.params.sampling_params import SamplingParams

VOCAB = 4
EOS = frozenset({3})
IDS = st.integers(0, VOCAB - 1)


def is_refused(params: SamplingParams) -> bool:
    try:
        check_tokens_left(params, VOCAB, EOS)
    except InvalidFieldError:
        return True
    return False


def left(params: SamplingParams, output: tuple[int, ...]) -> set[int]:
    """Tokens that may follow an output, by the definitions."""
    allowed = {*params.allowed_token_ids, *EOS} if params.allowed_token_ids else set(range(VOCAB))
    bad = params.bad_words_token_ids
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    return {
        token
        for token in allowed
        if not any((*output, token)[-len(ids) :] == ids for ids in bad)
        and not (token in ending and len(output) < params.min_tokens)
    }


@settings(max_examples=200)
@given(
    params=st.builds(
        SamplingParams,
        allowed_token_ids=st.lists(IDS, max_size=2).map(tuple),
        bad_words_token_ids=st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
        stop_token_ids=st.lists(IDS, max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 2),
    )
)
def test_masks_leave_a_token_after_every_output(params: SamplingParams) -> None:
    outputs = [output for length in range(4) for output in product(range(VOCAB), repeat=length)]
    if not is_refused(params):
        assert all(left(params, output) for output in outputs)
    elif all(len(ids) == 1 for ids in params.bad_words_token_ids):
        # Masks that do not depend on the output are refused only if they leave no token.
        assert not left(params, ())


def test_ungeneratable_ids_do_not_satisfy_masks() -> None:
    """Ids beyond the tokenizer's have a logit of minus infinity."""
    assert is_refused(SamplingParams(allowed_token_ids=(VOCAB,), min_tokens=1))
    assert not is_refused(SamplingParams(allowed_token_ids=(VOCAB,)))


def test_bias_of_id_unknown_to_model_is_refused() -> None:
    check_bias_ids(SamplingParams(logit_bias={VOCAB - 1: 1.0}), VOCAB)
    with pytest.raises(InvalidFieldError, match=r"logit_bias\[4\]"):
        check_bias_ids(SamplingParams(logit_bias={0: 1.0, VOCAB: 1.0}), VOCAB)
