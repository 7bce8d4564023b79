"""Sampling parameters between router and worker: both directions of the one mapping.

The router sends canonical parameters, with every field set; text and seeds stay with it.
"""

from __future__ import annotations

from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.params.logprobs import LOGPROB_FIELDS, PROCESSED, RAW
from common.params.sampling_params import DISTRIBUTION_FIELDS, SamplingParams

# Paths of the proto's fields.
SAMPLING_FIELDS: Final = frozenset(
    {
        *DISTRIBUTION_FIELDS,
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "stop_token_sequences",
        "stop_token_sequences.ids",
        "logit_bias",
        "bad_words_token_ids",
        "bad_words_token_ids.ids",
        "allowed_token_ids",
        "num_drafts",
        "grammar",
        *LOGPROB_FIELDS,
    }
)


def sampling_to_proto(params: SamplingParams) -> wpb.SamplingParams:
    """Parameters as a worker gets them."""
    made = wpb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        stop_token_sequences=[wpb.TokenIds(ids=ids) for ids in params.stop_token_sequences],
        logit_bias=dict(params.biases),
        bad_words_token_ids=[wpb.TokenIds(ids=ids) for ids in params.bad_words_token_ids],
        allowed_token_ids=params.allowed_token_ids,
        num_drafts=params.num_drafts,
        logprobs=params.logprobs,
        logprob_token_ids=params.logprob_token_ids,
        prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
    )
    # What nobody asks for takes no bytes.
    if params.logprobs_kind == PROCESSED:
        made.logprobs_kind = wpb.LOGPROBS_KIND_PROCESSED
    if params.prompt_logprobs_start > 1:
        made.prompt_logprobs_start = params.prompt_logprobs_start
    return made


def sampling_from_proto(params: wpb.SamplingParams) -> SamplingParams:
    """Parameters as a worker has got them.

    Raises:
        InvalidFieldError: one is out of range; named as a field of `sampling_params`.
    """
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids),
        stop_token_sequences=tuple(tuple(sequence.ids) for sequence in params.stop_token_sequences),
        logit_bias=params.logit_bias,
        bad_words_token_ids=tuple(tuple(sequence.ids) for sequence in params.bad_words_token_ids),
        allowed_token_ids=tuple(params.allowed_token_ids),
        num_drafts=params.num_drafts if params.HasField("num_drafts") else None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        logprob_token_ids=tuple(params.logprob_token_ids),
        logprobs_kind=PROCESSED if params.logprobs_kind == wpb.LOGPROBS_KIND_PROCESSED else RAW,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        prompt_logprobs_start=params.prompt_logprobs_start or 1,
        grammar=params.grammar,
    )
