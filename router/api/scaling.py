"""Metrics that KEDA scales workers by: the load of a model, and the metrics of a trigger. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from common.errors import InvalidFieldError
from common.params.options.types import Fraction, seconds
from router.api.in_flight import InFlightCall
from router.scheduling.lane import LaneStatus
from router.workers.session import WorkerState
from router.workers.worker_record import KnownWorker

METADATA: Final = "scalerMetadata"
MODEL: Final = "model"
QUEUE_AGE: Final = "queueAge"
TOKENS: Final = "outstandingTokens"
REQUESTS: Final = "requests"
OBJECTIVE: Final = "ttftObjective"
SLACK: Final = "slack"
# Keys with which KEDA itself connects; it sends them along.
_KEDA_KEYS: Final = frozenset({"scalerAddress", "enableTLS", "unsafeSsl"})
# KEDA resolves a key of this end from the environment of the scaled Pods, and keeps its name.
_FROM_ENVIRONMENT: Final = "FromEnv"
_DEFAULT_SLACK: Final = 0.5


@dataclass(frozen=True, slots=True)
class ScalingLoad:
    """Load of one model, or of all, for an autoscaler.

    Attributes:
        requests: requests that wait in this router, and sequences that run or wait at workers, whoever sent them.
        oldest_age_s: age of the oldest request that waits for a worker, at this router or another.
        first_token_age_s: age of the oldest request of this router without a first token, or `oldest_age_s`.
        outstanding_tokens: prompt tokens to compute, of all routers' requests.
    """

    requests: int = 0
    oldest_age_s: float = 0.0
    first_token_age_s: float = 0.0
    outstanding_tokens: int = 0


def scaling_load(model: str, calls: Iterable[InFlightCall], workers: Iterable[KnownWorker], now: float) -> ScalingLoad:
    """Load of a model.

    Workers report the sequences of all routers and the queues of all routers, so each router of a fleet gives the same
    figures as soon as a worker is up. Without a worker, a router knows its own requests alone.

    Args:
        model: name of the model; "" for all. Calls that name none count for each.
        calls: the calls in flight of this router.
        workers: all workers.
        now: monotonic seconds.
    """
    own, waiting, tokens, oldest, oldest_silent = 0, 0, 0, now, now
    for call in _of_model(model, calls):
        own += 1
        is_running = has_tokens = False
        for stream in call.streams:
            is_running = is_running or stream.session is not None
            has_tokens = has_tokens or stream.assembly.num_tokens > 0
        if not is_running:
            waiting += 1
            oldest = min(oldest, call.arrived)
            tokens += sum(stream.queued.tokens for stream in call.streams if stream.queued.lane is None)
        if not has_tokens:
            oldest_silent = min(oldest_silent, call.arrived)
    loads = list(_loads(model, workers))
    queue_age = max([now - oldest, *(load.fleet_age_s for load in loads)])
    return ScalingLoad(
        requests=max(own, waiting + sum(load.decoding_seqs + load.waiting_seqs for load in loads)),
        oldest_age_s=queue_age,
        first_token_age_s=max(now - oldest_silent, queue_age),
        outstanding_tokens=tokens + sum(load.outstanding_tokens + load.elsewhere_tokens for load in loads),
    )


def has_work(model: str, calls: Iterable[InFlightCall], workers: Callable[[], Iterable[KnownWorker]]) -> bool:
    """True if a model has a request. Unlike the whole load it is cheap in a busy router, which it is asked often.

    Args:
        model: as for `scaling_load`.
        calls: as for `scaling_load`.
        workers: returns all workers; called only if no call of this router is of the model.
    """
    return any(_of_model(model, calls)) or any(
        load.decoding_seqs or load.waiting_seqs or load.outstanding_tokens or load.elsewhere_tokens
        for load in _loads(model, workers())
    )


def _of_model(model: str, calls: Iterable[InFlightCall]) -> Iterator[InFlightCall]:
    return (call for call in calls if not model or call.model in ("", model))


def _loads(model: str, workers: Iterable[KnownWorker]) -> Iterator[LaneStatus]:
    """Loads of the connected workers of a model."""
    for worker in workers:
        if worker.load is not None and worker.state is not WorkerState.UNCONNECTED and model in ("", worker.model):
            yield worker.load


@dataclass(frozen=True, slots=True)
class ScalingMetric:
    """One metric of a trigger.

    Attributes:
        name: what KEDA asks for.
        target: value at which the number of workers is right.
        value: its value for a load.
    """

    name: str
    target: float
    value: Callable[[ScalingLoad], float]


@dataclass(frozen=True, slots=True)
class ScalingTrigger:
    """One trigger of a ScaledObject, read from its metadata.

    Attributes:
        model: name of its model; "" for all.
        metrics: its metrics, by name.
    """

    model: str
    metrics: Mapping[str, ScalingMetric]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> ScalingTrigger:
        """Reads the metadata of a trigger.

        Raises:
            InvalidFieldError: a key or a value is not valid, or there is no metric.
        """
        given = {key.removesuffix(_FROM_ENVIRONMENT): value for key, value in metadata.items()}
        if unknown := sorted(given.keys() - _KEDA_KEYS - {MODEL, SLACK, *_TARGETS}):
            raise _invalid(unknown[0], "is unknown", ", ".join((MODEL, SLACK, *_TARGETS)))
        metrics = [make(given) for key, make in _TARGETS.items() if key in given]
        if not metrics:
            raise InvalidFieldError(METADATA, "names no metric", f"at least one of {', '.join(_TARGETS)}")
        if SLACK in given and OBJECTIVE not in given:
            raise _invalid(SLACK, "has no objective", f"together with {OBJECTIVE}")
        return cls(given.get(MODEL, ""), {metric.name: metric for metric in metrics})

    def metric(self, name: str) -> ScalingMetric:
        """The metric called `name`.

        Raises:
            InvalidFieldError: the trigger has no such metric.
        """
        if name not in self.metrics:
            raise InvalidFieldError("metricName", f"{name[:64]!r} is not of this trigger", ", ".join(self.metrics))
        return self.metrics[name]


def _invalid(key: str, problem: str, valid: str) -> InvalidFieldError:
    return InvalidFieldError(f"{METADATA}.{key[:64]}", problem, valid)


def _positive(given: Mapping[str, str], key: str, read: Callable[[str], float], valid: str) -> float:
    text = given[key]
    try:
        number = read(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise _invalid(key, f"is {text[:64]!r}", valid)
    return number


def _queue_age(given: Mapping[str, str]) -> ScalingMetric:
    target = _positive(given, QUEUE_AGE, seconds, "a duration above 0, such as 2s")
    return ScalingMetric("queue-age", target, lambda load: load.oldest_age_s)


def _tokens(given: Mapping[str, str]) -> ScalingMetric:
    target = _positive(given, TOKENS, float, "a number above 0: prompt tokens for each worker")
    return ScalingMetric("outstanding-tokens", target, lambda load: load.outstanding_tokens)


def _requests(given: Mapping[str, str]) -> ScalingMetric:
    target = _positive(given, REQUESTS, float, "a number above 0: requests for each worker")
    return ScalingMetric("requests", target, lambda load: load.requests)


def _objective(given: Mapping[str, str]) -> ScalingMetric:
    objective = _positive(given, OBJECTIVE, seconds, "a duration above 0, such as 2s")
    try:
        slack = Fraction().read(given[SLACK]) if SLACK in given else _DEFAULT_SLACK
    except ValueError:
        slack = 1.0
    if slack >= 1:
        raise _invalid(SLACK, f"is {given[SLACK][:64]!r}", "a share below 100%, such as 50%")
    return ScalingMetric("ttft-use", 1 - slack, lambda load: load.first_token_age_s / objective)


# By the key that gives a metric's target.
_TARGETS: Final[Mapping[str, Callable[[Mapping[str, str]], ScalingMetric]]] = {
    REQUESTS: _requests,
    TOKENS: _tokens,
    QUEUE_AGE: _queue_age,
    OBJECTIVE: _objective,
}
