"""Runs a benchmark's requests on an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from common.cli.bench.load import Load
from common.cli.bench.records import INTERRUPTED, Record
from common.cli.bench.service import Terms
from common.cli.bench.workload import Work
from common.errors import ApiError

# A signal does not end a sleep, so `stop` is noticed after this time at the latest.
LONGEST_SLEEP_S: Final = 0.2


class AnswerPart(Protocol):
    """Addition of one step to an answer."""

    @property
    def output_tokens(self) -> Sequence[int]: ...


class Engine(Protocol):
    """The part of `worker.llm_engine.LLMEngine` that the benchmark uses."""

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any],
        *,
        request_id: str,
        stream_callback: Callable[[Any], None],
    ) -> str:
        """Adds a request, which the next steps compute; raises ApiError if it is invalid."""
        ...

    def step(self) -> list[dict[str, Any]]:
        """Computes one batch; returns the answers that have ended."""
        ...

    def has_unfinished(self) -> bool:
        """True if anything is left to compute."""
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; False if it is not live."""
        ...


class OfflineRun:
    """One run of a load on an engine, step by step: requests that are due are added between two steps.

    Attributes:
        records: of all requests that have been added.

    Args:
        load: decides when requests arrive.
        work_of: the work of a request, by its number.
        engine: computes.
        terms: of all requests; `model`, `timeout_s` and `metadata` are not used.
        name: prefix of the requests' ids; different for every run.
        on_step: called between two steps.
        clock: monotonic seconds.
        sleep: waits for the given seconds.
    """

    def __init__(
        self,
        load: Load,
        work_of: Callable[[int], Work],
        engine: Engine,
        terms: Terms,
        name: str,
        on_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.records: list[Record] = []
        self._live: dict[str, tuple[Work, Record]] = {}
        self._load = load
        self._work_of = work_of
        self._engine = engine
        self._terms = terms
        self._name = name
        self._on_step = on_step
        self._clock = clock
        self._sleep = sleep
        self._begin = 0.0
        self._stopped = False

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def stop(self) -> None:
        """Ends the run after the current step, or before it begins; for a signal handler."""
        self._stopped = True

    def run(self) -> list[Record]:
        """Computes everything. Returns the records."""
        self._begin = self._clock()
        while not self._stopped:
            for intended in self._load.take(self._now(), self.in_flight):
                self._add(intended)
            if self._engine.has_unfinished():
                self._step()
            elif self._load.exhausted(self._now()):
                return self.records
            else:
                self._pause()
            self._on_step()
        self._abort()
        return self.records

    def _add(self, intended: float) -> None:
        index = len(self.records)
        work, record = self._work_of(index), Record(index, intended, self._now())
        self.records.append(record)
        request_id = f"{self._name}-{index}"
        self._live[request_id] = work, record

        def on_part(part: AnswerPart) -> None:
            if part.output_tokens:
                record.arrivals.append(self._now())
                record.output_tokens += len(part.output_tokens)

        params = self._terms.params(work, index)
        try:
            self._engine.add_request(
                work.text or work.token_ids, params, request_id=request_id, stream_callback=on_part
            )
        except ApiError as error:
            self._end(request_id).status, record.message = error.code.name, error.message

    def _step(self) -> None:
        for answer in self._engine.step():
            work, record = self._live[answer["request_id"]]
            record.input_tokens = answer["num_tokens_input"]
            prompt_tokens = len(work.token_ids) or None
            said = answer["num_tokens_output"]
            record.check_lengths(work.output_tokens, prompt_tokens, said, exact=self._terms.ignore_eos)
            self._end(answer["request_id"])

    def _pause(self) -> None:
        """Sleeps until the next request is due, at most LONGEST_SLEEP_S."""
        due = self._load.next_time()
        if due is not None:
            self._sleep(min(LONGEST_SLEEP_S, max(0.0, due - self._now())))

    def _abort(self) -> None:
        for request_id in list(self._live):
            self._engine.abort(request_id)
            self._end(request_id).status = INTERRUPTED
        while self._engine.has_unfinished():
            self._engine.step()

    def _end(self, request_id: str) -> Record:
        _, record = self._live.pop(request_id)
        record.ended = self._now()
        return record

    def _now(self) -> float:
        return self._clock() - self._begin
