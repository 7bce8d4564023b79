"""Record of one request. Pure: times are seconds since the run's begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from common.wire.draft_counts import Counts

OK: Final = "OK"
# Not statuses of gRPC: an answer of another length than asked for, and a request that Ctrl-C ended.
WRONG_TOKEN_COUNT: Final = "WRONG_TOKEN_COUNT"
INTERRUPTED: Final = "INTERRUPTED"


@dataclass(slots=True)
class Record:
    """Times and counts of one request of a benchmark.

    Attributes:
        index: number of the request in its run, from 0.
        intended: when it was to be sent; latencies count from here.
        sent: when it was sent.
        ended: when its status came.
        status: `OK`, the name of another gRPC status, WRONG_TOKEN_COUNT or INTERRUPTED.
        message: what came with a status that is not OK.
        arrivals: when messages with tokens came; the first one had the first token.
        input_tokens: of the prompt, as the service counted them.
        cached_tokens: of these, found in a prefix cache; None where nothing says so.
        output_tokens: that came.
        queue_s: from the request's arrival at the service to its first step, as the service measured it.
        prefill_s: from there to its first token, likewise.
        service_ttft_s: the sum of both and of what lies between, likewise; None where the service says nothing of it,
            as with the two before.
        worker_id: which worker finished it; empty when unknown.
        attempts: workers that it was given to.
        drafts: of speculation, verified and accepted, by their position behind a token; empty where nothing says so.
    """

    index: int
    intended: float
    sent: float
    ended: float = 0.0
    status: str = OK
    message: str = ""
    arrivals: list[float] = field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    service_ttft_s: float | None = None
    worker_id: str = ""
    attempts: int = 1
    drafts: list[Counts] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if the answer is complete and has the requested length."""
        return self.status == OK

    @property
    def ttft(self) -> float | None:
        """Time to first token; None when there was none."""
        return self.arrivals[0] - self.intended if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for one token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Times between messages with tokens: the pauses that a reader sees."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def latency(self) -> float:
        """From the intended time to the end."""
        return self.ended - self.intended

    def check_lengths(self, asked: int, prompt_tokens: int | None, said: int, *, exact: bool) -> None:
        """Makes an answer that ended well a failure when it has another length than it must have.

        Args:
            asked: tokens to generate.
            prompt_tokens: of the prompt that was sent; None when not known.
            said: tokens of the answer, as the service counted them.
            exact: whether the answer must have so many tokens as were asked for, and not fewer.
        """
        if self.output_tokens > asked or self.output_tokens < (asked if exact else 1):
            wanted = f"{asked}" if exact else f"1 to {asked}"
            self._wrong(f"{self.output_tokens} tokens came, {wanted} were asked for")
        elif self.output_tokens != said:
            self._wrong(f"{self.output_tokens} tokens came, the service counted {said}")
        elif prompt_tokens is not None and self.input_tokens != prompt_tokens:
            self._wrong(f"the service counted {self.input_tokens} prompt tokens, {prompt_tokens} were sent")

    def _wrong(self, message: str) -> None:
        self.status, self.message = WRONG_TOKEN_COUNT, message
