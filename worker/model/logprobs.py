"""Makes rows of logprobs (common/wire/logprob_rows.py) from rows of logits.

The device's part starts with the step and is fetched with its tokens. Raw logprobs are of the logits before sampling
changes them. Logprobs of the processed distribution are computed on the host, by the reference kernels, from the logits
that penalties and masks have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from common.params.logprobs import LogprobLayout
from common.params.sampling_params import SamplingParams
from common.wire.logprob_rows import Words, rows_table
from kernels import logprobs
from kernels.interface import LogitStats, SamplingOps
from kernels.upload import to_device

Ints = npt.NDArray[np.int64]
# Waits for rows: by sampled row, or by sequence for given tokens.
Rows = Callable[[], dict[int, bytes]]
# Rows of prompt logits in memory at once: a prompt has many, each as wide as the vocabulary.
LOGIT_ROWS: Final = 32


@dataclass(frozen=True)
class AskedRows:
    """Sampled rows whose logprobs are wanted.

    Attributes:
        params: of their sequences.
        places: int64 [R], their rows among the sampled ones.
        raw: float32 [R, V], their logits before sampling.
    """

    params: list[SamplingParams]
    places: Ints
    raw: torch.Tensor


class TokenLogprobsMaker:
    """Makes rows of logprobs of tokens.

    Args:
        sampling: of the kernels.
        device: where the logits are.
    """

    def __init__(self, sampling: SamplingOps, device: torch.device) -> None:
        self._sampling = sampling
        self._device = device

    def ask(self, rows: Mapping[int, SamplingParams], logits: torch.Tensor) -> AskedRows:
        """Copies the logits of rows that want logprobs, before sampling changes them.

        Args:
            rows: parameters by row of `logits`, of the rows that want logprobs.
            logits: float32 [F, V].
        """
        places = np.array(list(rows), np.int64)
        raw = logits.index_select(0, to_device(places, self._device))
        return AskedRows(list(rows.values()), places, raw)

    def sampled(self, asked: AskedRows, logits: torch.Tensor, tokens: torch.Tensor) -> Rows:
        """Logprob rows of the sampled tokens, by their index in the step's logits.

        Args:
            asked: the rows that want logprobs.
            logits: float32 [F, V], after sampling.
            tokens: int64 [F].
        """
        own = tokens.index_select(0, to_device(asked.places, self._device))
        top = max(params.logprobs or 0 for params in asked.params)
        stats = self._sampling.logit_stats(asked.raw, own, top, _ids(asked.params))
        processed = [i for i, params in enumerate(asked.params) if params.processes_logprobs]
        left, fetched = self._fetched(asked.places[processed], logits, own) if processed else ((), list[int])

        def rows() -> dict[int, bytes]:
            found, ids = stats(), fetched()
            places = asked.places.tolist()
            made = _split(found, asked.params, places)
            for values, i in zip(left, processed, strict=True):
                made[places[i]] = _processed(values, asked.params[i], ids[i], _raw(found, i)).tobytes()
            return made

        return rows

    def _fetched(
        self, places: Ints, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[Iterable[npt.NDArray[np.float32]], Callable[[], list[int]]]:
        """Copies rows of logits and tokens to the host. On a GPU a step waits for the logits, not for the tokens."""
        rows = logits.index_select(0, to_device(places, self._device)).cpu().numpy()
        return rows, self._sampling.fetch(tokens)

    def given(self, seq_id: int, params: SamplingParams, parts: Iterable[tuple[torch.Tensor, list[int]]]) -> Rows:
        """Logprob rows of given tokens.

        Args:
            seq_id: of the sequence.
            params: of the sequence.
            parts: float32 logits [R, V], a few rows at a time, and the token after each.
        """
        layout, ids = params.prompt_logprob_layout, np.array(params.logprob_token_ids, np.int64)
        begun = [
            self._sampling.logit_stats(
                logits,
                to_device(np.array(tokens, np.int64), self._device),
                layout.top,
                np.broadcast_to(ids, (len(tokens), len(ids))),
            )
            for logits, tokens in parts
        ]
        return lambda: {seq_id: b"".join(_packed(stats(), layout).tobytes() for stats in begun)}


def _ids(every: list[SamplingParams]) -> Ints:
    """int64 [R, G]: each row's ids, padded to the longest."""
    given = np.zeros((len(every), max(len(params.logprob_token_ids) for params in every)), np.int64)
    for row, params in zip(given, every, strict=True):
        row[: len(params.logprob_token_ids)] = params.logprob_token_ids
    return given


def _split(stats: LogitStats, every: list[SamplingParams], places: list[int]) -> dict[int, bytes]:
    """Raw logprob rows by index; rows of equal length are made together."""
    made: dict[int, bytes] = {}
    layouts = [params.logprob_layout for params in every]
    for layout in dict.fromkeys(layouts):
        words = _packed(stats, layout)
        made |= {places[i]: words[i].tobytes() for i, own in enumerate(layouts) if own == layout}
    return made


def _packed(stats: LogitStats, layout: LogprobLayout, **more: npt.NDArray[np.float32]) -> Words:
    log_z = logprobs.log_normalizers(stats)
    of_rows = log_z[:, None]
    return rows_table(
        layout,
        (stats.own - log_z).astype(np.float32),
        stats.ranks,
        stats.top_ids,
        (stats.top - of_rows).astype(np.float32),
        (stats.given - of_rows).astype(np.float32),
        **more,
    )


def _raw(stats: LogitStats, row: int) -> npt.NDArray[np.float32]:
    """float32 [1]: the raw logprob of a row's token."""
    return (stats.own - logprobs.log_normalizers(stats)).astype(np.float32)[row : row + 1]


def _processed(
    logits: npt.NDArray[np.float32], params: SamplingParams, token: int, raw: npt.NDArray[np.float32]
) -> Words:
    """A logprob row of the distribution that a token was drawn from; `logits` float32 [V]."""
    token = max(token, 0)
    left, kept_mass = logprobs.processed(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    # Masses of other kernels may differ in their last bit, and with it the last id that top_p keeps.
    left[token] = logits[token] / np.float32(params.temperature or 1.0)
    layout = params.logprob_layout
    given = np.array([params.logprob_token_ids], np.int64).reshape(1, -1)
    stats = logprobs.logit_stats(left[None], np.array([token]), layout.top, given)
    return _packed(stats, layout, raw=raw, kept_mass=np.array([kept_mass], np.float32))
