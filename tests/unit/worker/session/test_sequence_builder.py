"""Sequences for embedding and classification: poolings of each head, and refusals before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, InvalidFieldError, NoOutputHeadError
from common.params.pooling import LABELS, LAST, MEAN
from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head, told_head, worker_head
from tests.unit.worker.session.support import FACTS, LIMITS
from worker.engine.sequence import Sequence
from worker.session.sequence_builder import build_sequence, check_sequence

PROMPT = (1, 2, 3)


def built(
    head: Head, num_labels: int = 0, max_tokens: int = 1, prompt_len: int = len(PROMPT), **given: Any
) -> Sequence:
    limits = replace(LIMITS, model="m", head=head, num_labels=num_labels)
    params = wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens)
    request = wpb.SubmitSequence(token_ids=PROMPT, params=params)
    checked = check_sequence(request, limits)
    return build_sequence(request, *checked, limits, prompt_len=prompt_len, seed=0, arrived=0.0, deadline=None, **given)


def test_each_head_accepts_its_poolings() -> None:
    assert [built(OUTPUT_HEAD, pooling=pooling).pooling for pooling in (None, LAST, MEAN)] == [None, LAST, MEAN]
    assert [built(NO_HEAD, pooling=pooling).pooling for pooling in (LAST, MEAN)] == [LAST, MEAN]
    assert built(CLASSIFIER, 3, pooling=LABELS).pooling == LABELS


@pytest.mark.parametrize(
    ("head", "given", "error"),
    [
        (NO_HEAD, {}, NoOutputHeadError),
        (CLASSIFIER, {"num_labels": 1}, NoOutputHeadError),
        (OUTPUT_HEAD, {"pooling": LABELS}, InvalidFieldError),
        (NO_HEAD, {"pooling": LABELS}, InvalidFieldError),
        (NO_HEAD, {"pooling": LAST, "max_tokens": 2}, InvalidFieldError),
        (OUTPUT_HEAD, {"pooling": MEAN, "prompt_len": 2}, InvalidFieldError),
    ],
)
def test_pooling_unsupported_by_head_is_refused(head: Head, given: dict[str, Any], error: type[ApiError]) -> None:
    with pytest.raises(error):
        built(head, **given)


def test_welcome_names_head() -> None:
    for head in (OUTPUT_HEAD, NO_HEAD, CLASSIFIER):
        assert told_head(worker_head(head)) == head
        told = replace(FACTS, head=head, num_labels=2).to_proto(wpb.WORKER_STATE_SERVING)
        assert (told.head, told.num_labels) == (worker_head(head), 2)
        assert ("logprobs" in told.features, "embed" in told.features) == (head == OUTPUT_HEAD, True)
    # One of a later version.
    assert told_head(9) == NO_HEAD  # type: ignore[arg-type]
