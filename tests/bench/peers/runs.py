"""What peers are asked and what comes back, whether a client saw it or an engine in a process of its own.

Standard library only, so that engines in other venvs can use it. An engine reads one job per line from standard input
and writes one answer per line to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.cli.bench.records import Record
from common.cli.bench.workload import Work

# Seconds since a run's begin.
Clock = Callable[[], float]


class WrongWorkError(Exception):
    """A peer did other work than requested, so its figures are not comparable."""


@dataclass(frozen=True, slots=True)
class Job:
    """Greedy answers of a fixed length, whatever the model says about an end.

    Attributes:
        works: prompts as token ids, in the order in which they are to begin.
        concurrency: answers at a time; the next one begins when one has ended.
        limit_s: what has not ended then is given up.
    """

    works: Sequence[Work]
    concurrency: int
    limit_s: float

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Job:
        """Of such a line."""
        fields = json.loads(line)
        return cls([Work(**work) for work in fields["works"]], fields["concurrency"], fields["limit_s"])


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a job.

    Attributes:
        records: of the answers that came whole; seconds since the run's begin.
        complete: whether all came within the limit.
    """

    records: Sequence[Record]
    complete: bool

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Run:
        """Of such a line."""
        fields: Mapping[str, Any] = json.loads(line)
        return cls([Record(**record) for record in fields["records"]], fields["complete"])


def clock_from_now() -> Clock:
    """A clock that shows 0 now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin


def check(record: Record, work: Work) -> Record:
    """`record`, of an answer that has ended.

    Raises:
        WrongWorkError: prompt or answer have not exactly the tokens asked for.
    """
    got, asked = (record.input_tokens, record.output_tokens), (len(work.token_ids), work.output_tokens)
    if got != asked:
        raise WrongWorkError(f"request {record.index}: tokens of prompt and answer are {got}, asked for were {asked}")
    return record


def serve_jobs(load: Callable[[], Callable[[Job], Run]]) -> None:
    """An engine's main loop: loads, says so with an empty line, and answers jobs until its input ends.

    What libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = load()
    print(file=answers, flush=True)
    for line in sys.stdin:
        print(run(Job.decode(line)).encode(), file=answers, flush=True)
