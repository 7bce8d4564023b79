"""Stop rules: stop sequences, end of sequence, stop token ids, length."""

from __future__ import annotations

from typing import NamedTuple

from common.config import Config
from worker.engine.sequence import EndReason, Sequence


class Stop(NamedTuple):
    """Why a sequence stops at its newest token."""

    leave_reason: str
    end_reason: EndReason
    token_id: int | None = None
    token_sequence: list[int] | None = None


class StopRules:
    """Checks the stop rules of one model.

    Args:
        config: `eos_token_id` and `stop_token_ids` come from the generation config and all mean "end of sequence"; only
            `finish_reason` differs.
        max_model_len: longest prompt plus output in tokens.
    """

    def __init__(self, config: Config, max_model_len: int) -> None:
        self.eos_token_id = config.eos_token_id
        self.eos_token_ids = config.eos_token_ids
        self.max_model_len = max_model_len

    def prepare(self, seq: Sequence) -> None:
        """Sets the fields of `seq` by which `Sequence.may_end` tells whether `check` is needed."""
        params = seq.sampling_params
        seq.length_limit = min(seq.num_prompt_tokens + params.max_tokens, self.max_model_len)
        ended_by = frozenset() if params.ignore_eos else self.eos_token_ids
        ends = [*params.stop_token_ids, *(stop[-1] for stop in seq.stop_token_sequences if stop)]
        seq.stopping_ids = ended_by.union(ends) if ends else ended_by

    def check(self, seq: Sequence) -> Stop | None:
        """The rule that ends `seq` at its newest output token; call after every single token.

        The order is stop token sequences, end of sequence, stop token ids, length. Before `min_tokens`, and without
        output, only the length counts. A model does not sample stopping ids before `min_tokens`
        (worker/model/logit_masks.py); a simulation may.
        """
        params = seq.sampling_params
        num_tokens = seq.num_tokens
        num_output = num_tokens - seq.num_prompt_tokens
        if num_output > 0 and num_output >= params.min_tokens:
            stop = _sequence_stop(seq, num_output) or self._token_stop(seq)
            if stop is not None:
                return stop
        if num_tokens >= seq.length_limit:
            return Stop("max_tokens", EndReason.LENGTH)
        return None

    def _token_stop(self, seq: Sequence) -> Stop | None:
        token = seq.last_token
        params = seq.sampling_params
        if token in self.eos_token_ids and not params.ignore_eos:
            return Stop("eos" if token == self.eos_token_id else f"stop_{token}", EndReason.EOS, token)
        if token in params.stop_token_ids:
            return Stop(f"stop_{token}", EndReason.STOP_TOKEN, token)
        return None


def _sequence_stop(seq: Sequence, num_output: int) -> Stop | None:
    for stop in seq.stop_token_sequences:
        # Only within the output: the border to the prompt is not a place to match.
        if 0 < len(stop) <= num_output and seq.token_ids[-len(stop) :] == stop:
            return Stop("stop_sequence", EndReason.STOP_SEQUENCE, token_sequence=list(stop))
    return None
