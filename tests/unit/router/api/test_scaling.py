"""What KEDA scales by: the load of a model, and the metrics of a trigger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import InvalidFieldError
from router.api.in_flight import InFlightCall
from router.api.scaling import ScalingLoad, ScalingTrigger, has_work, scaling_load
from router.scheduling.lane import LaneStatus
from router.workers.session import WorkerState
from router.workers.worker_record import KnownWorker

NOW = 100.0


def stream(*, tokens: int = 0, runs: bool = False, said: int = 0, lane: object = None) -> Any:
    queued = SimpleNamespace(tokens=tokens, lane=lane)
    return SimpleNamespace(session=object() if runs else None, assembly=SimpleNamespace(num_tokens=said), queued=queued)


def call(age_s: float, *streams: Any, model: str = "m") -> InFlightCall:
    return cast("InFlightCall", SimpleNamespace(model=model, arrived=NOW - age_s, streams=streams))


def worker(model: str = "m", state: WorkerState = WorkerState.SERVING, **load: Any) -> KnownWorker:
    zero: dict[str, Any] = dict.fromkeys(
        ("queued", "decoding_seqs", "waiting_seqs", "outstanding_tokens", "prefill_rate", "report_age_ms"), 0
    )
    return KnownWorker("a:1", state, model=model, load=LaneStatus(**{**zero, **load}))


def test_nothing_is_no_load() -> None:
    assert scaling_load("m", [], [], NOW) == ScalingLoad()
    assert not has_work("m", [], lambda: [worker()])


def test_call_without_a_worker_is_load() -> None:
    """Its prompt is unknown until a worker brings the tokenizer."""
    calls = [call(3.0), call(1.0, stream(tokens=40))]
    assert scaling_load("m", calls, [], NOW) == ScalingLoad(2, 3.0, 3.0, 40)
    assert has_work("m", calls, list)


def test_call_without_a_model_counts_for_each() -> None:
    calls = [call(3.0, model=""), call(1.0, model="other")]
    assert scaling_load("m", calls, [], NOW).requests == 1
    assert scaling_load("other", calls, [], NOW).requests == 2
    assert scaling_load("", calls, [], NOW).requests == 2


def test_running_calls_are_counted_by_the_workers() -> None:
    """The worker's sequences are of all routers: this router's are among them."""
    calls = [call(9.0, stream(runs=True, said=5)), call(4.0, stream(runs=True))]
    load = scaling_load("m", calls, [worker(decoding_seqs=7, waiting_seqs=1, outstanding_tokens=30)], NOW)
    assert load == ScalingLoad(8, 0.0, 4.0, 30)


def test_request_on_its_way_is_active() -> None:
    """The worker has not reported it yet."""
    calls = [call(1.0, stream(runs=True))]
    assert scaling_load("m", calls, [worker()], NOW).requests == 1
    assert has_work("m", calls, lambda: [worker()])


def test_request_in_a_lane_is_counted_once() -> None:
    """The lane's status has its tokens."""
    load = scaling_load("m", [call(2.0, stream(tokens=40, lane=object()))], [worker(outstanding_tokens=40)], NOW)
    assert (load.requests, load.outstanding_tokens) == (1, 40)


def test_queues_of_other_routers_are_counted() -> None:
    workers = [worker(elsewhere_tokens=500, fleet_age_s=1.5)]
    assert scaling_load("m", [], workers, NOW) == ScalingLoad(0, 1.5, 1.5, 500)
    assert has_work("m", [], lambda: workers)


def test_workers_of_other_models_and_lost_ones_do_not_count() -> None:
    busy: dict[str, Any] = {"decoding_seqs": 3, "outstanding_tokens": 9}
    workers = [worker("other", **busy), worker(state=WorkerState.UNCONNECTED, **busy)]
    assert scaling_load("m", [], workers, NOW) == ScalingLoad()
    assert not has_work("m", [call(1.0, model="other")], lambda: workers)
    assert scaling_load("", [], workers, NOW).requests == 3
    assert has_work("other", [], lambda: workers)


def test_trigger_metrics_have_targets_and_values() -> None:
    given = {"requests": "48", "outstandingTokens": "2e4", "queueAge": "1500ms", "ttftObjective": "4s"}
    trigger = ScalingTrigger.from_metadata({"scalerAddress": "router:50054", "model": "m", **given})
    assert trigger.model == "m"
    targets = {name: metric.target for name, metric in trigger.metrics.items()}
    assert targets == {"requests": 48.0, "outstanding-tokens": 20_000.0, "queue-age": 1.5, "ttft-use": 0.5}
    load = ScalingLoad(7, 3.0, 6.0, 900)
    values = {name: metric.value(load) for name, metric in trigger.metrics.items()}
    assert values == {"requests": 7, "outstanding-tokens": 900, "queue-age": 3.0, "ttft-use": 1.5}


def test_slack_is_the_part_of_the_objective_that_stays_free() -> None:
    trigger = ScalingTrigger.from_metadata({"ttftObjective": "2s", "slack": "25%"})
    assert trigger.metric("ttft-use").target == 0.75


def test_key_from_the_environment_is_read() -> None:
    assert ScalingTrigger.from_metadata({"requestsFromEnv": "5", "modelFromEnv": "m"}).model == "m"


@pytest.mark.parametrize(
    ("metadata", "named", "valid"),
    [
        ({}, "scalerMetadata names no metric", "requests, outstandingTokens, queueAge, ttftObjective"),
        ({"model": "m"}, "scalerMetadata names no metric", "ttftObjective"),
        ({"queueage": "2s"}, "scalerMetadata.queueage is unknown", "queueAge"),
        ({"queueAge": "soon"}, "scalerMetadata.queueAge is 'soon'", "2s"),
        ({"queueAge": "0s"}, "scalerMetadata.queueAge is '0s'", "above 0"),
        ({"requests": "-3"}, "scalerMetadata.requests is '-3'", "above 0"),
        ({"requests": "nan"}, "scalerMetadata.requests is 'nan'", "above 0"),
        ({"outstandingTokens": "inf"}, "scalerMetadata.outstandingTokens is 'inf'", "above 0"),
        ({"ttftObjective": "2s", "slack": "1"}, "scalerMetadata.slack is '1'", "below 100%"),
        ({"ttftObjective": "2s", "slack": "most"}, "scalerMetadata.slack is 'most'", "below 100%"),
        ({"requests": "3", "slack": "50%"}, "scalerMetadata.slack has no objective", "ttftObjective"),
    ],
)
def test_wrong_metadata_is_refused_by_name(metadata: dict[str, str], named: str, valid: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        ScalingTrigger.from_metadata(metadata)
    assert str(refused.value).startswith(named)
    assert valid in str(refused.value)


def test_metric_of_another_trigger_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"metricName 'queue-age' is not of this trigger.*requests"):
        ScalingTrigger.from_metadata({"requests": "3"}).metric("queue-age")
