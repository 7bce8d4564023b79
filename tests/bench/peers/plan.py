"""What a run measures, in which order, and how much work fits into the time there is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from common.cli.bench.workload import RandomWorkload, Work
from common.params.options.types import Lengths
from tests.bench.peers.floors import Machine, Shape, closed_loop_bound

PROMPTS: Final = Lengths(32, 256)
OUTPUT_TOKENS: Final = 64
# Requests of a row by concurrency; others get three for each place.
REQUESTS: Final[Mapping[int, int]] = {1: 6, 8: 32, 32: 96}
QUICK_REQUESTS: Final = 3
QUICK_TOKENS: Final = 8
_PER_PLACE: Final = 3
# Rounds of a workload have the same lengths and other ids.
_WARM_UP_ROUND: Final = 1_000_000
_WARM_UP_TOKENS: Final = 4
# How much of the bound a peer is taken to reach, and seconds that a row takes beside its requests, before any row ran.
_USUAL_SHARE: Final = 0.4
_BETWEEN_ROWS_S: Final = 6.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One row to measure."""

    repeat: int
    concurrency: int
    peer: str


def turns(peers: Sequence[str], concurrencies: Sequence[int], repeats: int) -> Iterator[Turn]:
    """Peers interleaved: each repetition has all of them at each concurrency, one right after the other."""
    for repeat in range(repeats):
        for concurrency in concurrencies:
            for peer in peers:
                yield Turn(repeat, concurrency, peer)


def workload(seed: int, vocab_size: int, output_tokens: int = OUTPUT_TOKENS) -> RandomWorkload:
    """The requests of all peers."""
    return RandomWorkload(seed, vocab_size, PROMPTS, Lengths(output_tokens, output_tokens))


def works(source: RandomWorkload, turn: Turn, count: int) -> list[Work]:
    """A row's requests, equal for all peers in the same repetition and at the same concurrency."""
    return [source.work(turn.repeat * 1000 + turn.concurrency, index) for index in range(count)]


def warm_up(source: RandomWorkload, count: int) -> list[Work]:
    """Requests with short answers and ids that no row has."""
    requests = (source.work(_WARM_UP_ROUND, index) for index in range(count))
    return [Work(_WARM_UP_TOKENS, request.token_ids) for request in requests]


def full_requests(concurrency: int) -> int:
    """Requests of a row when there is time."""
    return REQUESTS.get(concurrency, _PER_PLACE * concurrency)


def fitting_requests(
    concurrencies: Sequence[int], rows_each: int, seconds: float, machine: Machine, shape: Shape
) -> dict[int, int]:
    """Requests per row by concurrency, so that `rows_each` rows at each concurrency take about `seconds` in all.

    One number for every peer, by what the machine can do and not by any peer's own speed, so that all do the same work.
    At least one request for each place, and two; at most `full_requests`.
    """
    work_s = {c: full_requests(c) * _request_s(c, machine, shape) for c in concurrencies}
    free_s = seconds - rows_each * len(concurrencies) * _BETWEEN_ROWS_S
    scale = free_s / (rows_each * sum(work_s.values()))
    return {c: min(full_requests(c), max(c, 2, round(full_requests(c) * scale))) for c in concurrencies}


def _request_s(concurrency: int, machine: Machine, shape: Shape) -> float:
    prompt = (PROMPTS.low + PROMPTS.high) // 2
    bound = closed_loop_bound(shape, machine, concurrency, prompt, OUTPUT_TOKENS, 2.0)
    return OUTPUT_TOKENS / (bound.in_series * _USUAL_SHARE)


@dataclass(slots=True)
class Budget:
    """The time of a run.

    Attributes:
        end: when the last row must have ended; None is never. Of the same clock as `now` elsewhere.
        row_limit_s: longest time of a row.
    """

    end: float | None
    row_limit_s: float
    _took: dict[tuple[str, int], float] = field(default_factory=dict)

    def limit(self, turn: Turn, now: float) -> float:
        """Seconds that a row may take; 0 when it would not end in time, going by the same row a repetition before."""
        if self.end is None:
            return self.row_limit_s
        left = self.end - now
        usual = self._took.get((turn.peer, turn.concurrency), 0.0)
        return max(0.0, min(self.row_limit_s, left)) if usual <= left else 0.0

    def note(self, turn: Turn, seconds: float) -> None:
        """Records that a row took `seconds`, with its preparation."""
        self._took[turn.peer, turn.concurrency] = seconds
