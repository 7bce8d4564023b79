"""Options of `fissile bench`, besides those of the engine and of sampling."""

from __future__ import annotations

from typing import Final

import click

from common.params.options.engine import OFFLINE
from common.params.options.option import FILE, Option
from common.params.options.types import OBJECTIVES, Duration, LengthRange, Lengths, Numbers, Objectives

BENCH_SERVE: Final = "bench serve"
BENCHMARKS: Final = (BENCH_SERVE, OFFLINE)
DEFAULT_CONCURRENCY: Final = (1, 8, 32)
DEFAULT_INPUT: Final = Lengths(32, 256)
# Fewest requests of a row; requests of a closed loop for each in flight; seconds in which an open loop sends.
MIN_REQUESTS: Final = 10
REQUESTS_PER_PLACE: Final = 4
OPEN_LOOP_S: Final = 30.0
_COUNT: Final = click.IntRange(min=1)

BENCH: Final = (
    Option(
        "--concurrency", "FISSILE_BENCH_CONCURRENCY",
        "Closed loop: number of requests in flight; a row for each number. Default: "
        f"{','.join(map(str, DEFAULT_CONCURRENCY))}.",
        BENCHMARKS, Numbers(int), metavar="N[,N...]",
    ),
    Option(
        "--rate", "FISSILE_BENCH_RATE",
        "Open loop instead: requests per second on average, whatever the service does; a row for each number. Times "
        "count from when a request was to be sent.",
        BENCHMARKS, Numbers(float), metavar="R[,R...]",
    ),
    Option(
        "--burstiness", "FISSILE_BENCH_BURSTINESS",
        "Shape of the arrivals of --rate: 1 is a Poisson process, less is burstier, more is more regular, inf evenly "
        "spaced. Default: 1.",
        BENCHMARKS, click.FLOAT, metavar="SHAPE",
    ),
    Option(
        "--requests", "FISSILE_BENCH_REQUESTS",
        f"Number of requests of each row. Default without --duration: {REQUESTS_PER_PLACE} for each in flight, or as "
        f"many as --rate sends in {OPEN_LOOP_S:g} s; at least {MIN_REQUESTS}.",
        BENCHMARKS, _COUNT,
    ),
    Option(
        "--duration", "FISSILE_BENCH_DURATION",
        "Duration of each row, for example 60s: then no more requests are sent, and those in flight finish. With "
        "--requests, whichever is first. Default: no limit.",
        BENCHMARKS, Duration(), metavar="TIME",
    ),
    Option(
        "--warmup", "FISSILE_BENCH_WARMUP",
        "Number of requests before each row that do not count, with prompts of their own.",
        BENCHMARKS, click.IntRange(min=0), 2,
    ),
    Option(
        "--repeat", "FISSILE_BENCH_REPEAT",
        "Number of times that all rows are measured, in turn, so that drift affects all of them alike.",
        BENCHMARKS, _COUNT, 1,
    ),
    Option(
        "--input-len", "FISSILE_BENCH_INPUT_LEN",
        f"Tokens of a prompt, uniform in a range, or one number. Prompts are random token ids. Default: "
        f"{DEFAULT_INPUT}.",
        BENCHMARKS, LengthRange(), metavar="LOW:HIGH",
    ),
    Option(
        "--output-len", "FISSILE_BENCH_OUTPUT_LEN", "Tokens of an answer, uniform in a range, or one number.",
        BENCHMARKS, LengthRange(), Lengths(64, 64), metavar="LOW:HIGH",
    ),
    Option(
        "--prefix-len", "FISSILE_BENCH_PREFIX_LEN",
        "Number of tokens that all prompts of a row begin with, before those of --input-len: for prefix caches. "
        "Default: 0.",
        BENCHMARKS, click.IntRange(min=0),
    ),
    Option(
        "--dataset", "FISSILE_BENCH_DATASET",
        'Prompts from a file instead: a JSON object a line, {"prompt": TEXT}, {"messages": [...]} or {"token_ids": '
        '[...]}, with "max_tokens" where it is not --output-len.',
        BENCHMARKS, FILE, metavar="FILE",
    ),
    Option(
        "--seed", "FISSILE_BENCH_SEED",
        "Seed of prompts, lengths, arrival times and sampling: the same seed and the same list of loads give the same "
        "work everywhere; lengths are the same in every row.",
        BENCHMARKS, click.IntRange(0, 2**64 - 1), 0,
    ),
    Option(
        "--ignore-eos/--no-ignore-eos", "FISSILE_BENCH_IGNORE_EOS",
        "Continue past the model's end-of-sequence tokens, so that every answer has the length asked for; another "
        "length is a failure.",
        BENCHMARKS, default=True,
    ),
    Option(
        "--slo", "FISSILE_BENCH_SLO",
        "Objectives, such as ttft=200ms,tpot=50ms; requests that meet them all are counted as goodput. Metrics: "
        f"{', '.join(OBJECTIVES)}. Default: none.",
        BENCHMARKS, Objectives(), metavar="METRIC=TIME[,...]",
    ),
    Option(
        "--json", "FISSILE_BENCH_JSON",
        "Write everything as JSON to this file; - is standard output, and the table then goes to standard error. "
        "Default: no file.",
        BENCHMARKS, parameter="json_file", metavar="FILE|-",
    ),
    Option(
        "--details/--no-details", "FISSILE_BENCH_DETAILS",
        "Print all figures of every row below the table. Default: only when there is one row.",
        BENCHMARKS,
    ),
    Option(
        "--service-pid", "FISSILE_BENCH_SERVICE_PID",
        "Process of the service on this machine. Its computing, with its children's, does not count as foreign. "
        "Repeatable. Default: the process that listens at a loopback address, and the `fissile serve` that started it.",
        (BENCH_SERVE,), _COUNT, parameter="service_pids", is_repeatable=True,
    ),
)  # fmt: skip
