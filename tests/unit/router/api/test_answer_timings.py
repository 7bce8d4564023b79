"""Timings of an answer: the ledger of its stream through queue, worker, loss and delivery."""

from __future__ import annotations

from array import array

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.params.sampling_params import SamplingParams
from common.rpc.durations import to_seconds
from common.telemetry.ledger import Blame, Ledger
from common.telemetry.names import Stage
from common.text.answer_text import AnswerText
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import FirstTokenInfo, WorkerPhase, WorkerReport
from router.api.responses import fill_response
from router.requests.stream import RequestStream, RoutedRequest, WritePacer
from router.scheduling.failover import Loss
from router.workers.session_state import RouterSession

PROMPT = array("I", [1, 2, 3])


def _stream(tenant: str = "mine") -> RequestStream:
    """A stream that was tokenized for 1 s and is queued from time 1 on."""
    ledger = Ledger(Stage.PREPARE, 0.0)
    ledger.enter(Stage.QUEUE, 1.0)
    params = SamplingParams(max_tokens=10)
    request = RoutedRequest("m", "m", PROMPT, params, 0, 0, 0.0, request_id="r", tenant=tenant, ledger=ledger)
    assembly = StreamAssembly(len(PROMPT), text=AnswerText(None))
    return RequestStream(request.queued(1), request, assembly, lambda *_: None, WritePacer())


def _submit(stream: RequestStream, now: float) -> None:
    stream.attempts.begin("w", "n", stream.assembly.num_tokens, now)
    stream._account_submission(now)


def _produce(stream: RequestStream, token_id: int, now: float) -> None:
    stream.assembly.begin(FirstTokenInfo(time=now))
    stream.assembly.append(stream.assembly.num_tokens, [token_id], now)


def _parts(stream: RequestStream, now: float) -> dict[str, float]:
    """Parts in the finish of the stream, which is made at `now`; they add up."""
    end = wpb.SequenceEnd(end_pos=stream.assembly.num_tokens, reason=wpb.END_REASON_EOS)
    stream.assembly.finish(end)
    timings = _timings(stream, now)
    parts = {part.stage: to_seconds(part.duration) for part in timings.parts}
    unexplained = to_seconds(timings.unexplained)
    assert sum(parts.values()) + unexplained == pytest.approx(to_seconds(timings.total)) == now
    return {**parts, **({Stage.UNEXPLAINED: unexplained} if unexplained else {})}


def _timings(stream: RequestStream, now: float) -> pb.Timings:
    part = stream.assembly.next_chunk()
    assert part is not None
    message = pb.GenerateResponse()
    fill_response(message, part, stream, lambda: now, has_info=False)
    return message.finish.timings


def _report(now: float, **seconds: float) -> WorkerReport:
    parts = [wpb.TimePart(stage=stage, us=round(value * 1e6)) for stage, value in seconds.items()]
    return WorkerReport.from_proto(wpb.SequenceEnd(parts=parts), now)


def test_workers_parts_and_the_wire_fill_the_time_there() -> None:
    stream = _stream()
    _submit(stream, 3.0)
    _produce(stream, 5, 8.0)
    stream.assembly.times.report = _report(8.0, worker_queue=1.0, prefill=2.0, decode=1.5)
    stream.account_end(9.0, written=8.5)
    assert _parts(stream, 9.0) == {
        Stage.PREPARE: 1.0,
        Stage.QUEUE: 2.0,
        Stage.WIRE: 0.5,
        Stage.WORKER_QUEUE: 1.0,
        Stage.PREFILL: 2.0,
        Stage.DECODE: 1.5,
        Stage.CLIENT_WAIT: 0.5,
        Stage.DELIVERY: 0.5,
    }


def test_worker_without_report_leaves_its_time_unexplained() -> None:
    stream = _stream()
    _submit(stream, 1.0)
    _produce(stream, 5, 4.0)
    stream.account_end(4.0, written=0.0)
    assert _parts(stream, 4.0) == {Stage.PREPARE: 1.0, Stage.UNEXPLAINED: 3.0}


def test_stage_of_a_later_version_is_unexplained() -> None:
    stream = _stream()
    _submit(stream, 1.0)
    _produce(stream, 5, 4.0)
    stream.assembly.times.report = _report(4.0, decode=2.0, thinking=1.0)
    stream.account_end(4.0, written=0.0)
    assert _parts(stream, 4.0) == {Stage.PREPARE: 1.0, Stage.DECODE: 2.0, Stage.UNEXPLAINED: 1.0}


def test_recovery_lasts_from_the_last_token_to_the_first_of_the_next_attempt() -> None:
    stream = _stream()
    _submit(stream, 1.0)
    _produce(stream, 5, 3.0)
    stream.attempts.end(stream.assembly.num_tokens, 9.0, Loss.SILENT)
    stream.account_loss()
    _submit(stream, 10.0)
    _produce(stream, 6, 11.0)
    stream.assembly.times.report = _report(11.0, decode=0.5)
    stream.account_end(11.0, written=0.0)
    assert _parts(stream, 11.0) == {Stage.PREPARE: 1.0, Stage.UNEXPLAINED: 2.0, Stage.RECOVERING: 8.0}


def test_request_that_ends_in_the_queue_has_the_causes_of_its_wait() -> None:
    """Former fault: all of it was `queue`, and nobody was blamed."""
    stream = _stream()
    wait, blame = stream.queued.wait, Blame("b", "mine", 1.5)
    wait.held, wait.parked_s, wait.own_s, wait.blame = {Stage.GATE_HOLD: 2.0}, 0.5, 1.5, (Stage.OWN_QUEUE, blame)
    stream.account_end(9.0, 9.0)
    assert stream.ledger.parts(9.0) == {
        Stage.PREPARE: 1.0,
        Stage.OWN_QUEUE: 1.5,
        Stage.QUEUE: 4.0,
        Stage.GATE_HOLD: 2.0,
        Stage.PLACEMENT_WAIT: 0.5,
    }
    assert stream.ledger.blames == {Stage.OWN_QUEUE: blame}


def test_request_that_ends_without_another_worker_recovers_until_then() -> None:
    """Former fault: the time after the loss counted as the client's."""
    stream = _stream()
    _submit(stream, 1.0)
    _produce(stream, 5, 3.0)
    stream.attempts.end(stream.assembly.num_tokens, 4.0, Loss.DIED)
    stream.account_loss()
    stream.account_end(9.0, 9.0)
    assert stream.ledger.parts(9.0) == {Stage.PREPARE: 1.0, Stage.RECOVERING: 6.0, Stage.UNEXPLAINED: 2.0}


def test_worker_that_returned_the_request_was_a_queue() -> None:
    stream = _stream()
    _submit(stream, 2.0)
    stream.account_return(5.0)
    _submit(stream, 6.0)
    _produce(stream, 5, 7.0)
    stream.assembly.times.report = _report(7.0, decode=1.0)
    stream.account_end(7.0, written=0.0)
    assert _parts(stream, 7.0) == {Stage.PREPARE: 1.0, Stage.QUEUE: 2.0, Stage.WORKER_QUEUE: 3.0, Stage.DECODE: 1.0}


def _session(now: float, **seconds: float) -> RouterSession:
    """A session whose worker's steps took these seconds until `now`, by stage."""
    session = RouterSession("router", 5.0)
    sums = wpb.StepSums(**{f"{stage}_us": round(value * 1e6) for stage, value in seconds.items()})
    session.apply(wpb.StepOutput(sums=sums), now)
    return session


def _enter(stream: RequestStream, stage: Stage, session: RouterSession, **seconds: float) -> None:
    """Reports a stage that begins with the session's newest sums."""
    parts = [wpb.TimePart(stage=name, us=round(value * 1e6)) for name, value in seconds.items()]
    phase = wpb.SequencePhase(stage=stage, parts=parts, sums=session.sums)
    stream.assembly.times.enter(WorkerPhase.from_proto(phase))


def test_answer_without_an_end_of_the_worker_is_divided_by_its_sums() -> None:
    stream = _stream()
    _submit(stream, 2.0)
    _produce(stream, 5, 4.0)
    _enter(stream, Stage.DECODE, _session(4.0, decode=100.0, stall=7.0), worker_queue=0.5, prefill=1.0)
    _produce(stream, 6, 8.0)
    stream.assembly.finish(wpb.SequenceEnd(end_pos=stream.assembly.num_tokens, reason=wpb.END_REASON_EOS))
    stream.account_leave(_session(8.0, decode=101.5, neighbours=1.5, stall=7.0), 8.25)
    stream.account_end(9.0, written=0.0)
    assert _parts(stream, 9.0) == {
        Stage.PREPARE: 1.0,
        Stage.QUEUE: 1.0,
        Stage.WIRE: 1.5,
        Stage.WORKER_QUEUE: 0.5,
        Stage.PREFILL: 1.0,
        Stage.DECODE: 1.5,
        Stage.NEIGHBOURS: 1.5,
        Stage.DETOKENIZE: 0.25,
        Stage.DELIVERY: 0.75,
    }


@pytest.mark.parametrize(
    ("stage", "left", "expected"),
    [(None, 4.5, Stage.WORKER_QUEUE), (Stage.PREEMPTED, 4.5, Stage.PREEMPTED), (Stage.DECODE, 9.0, Stage.STALL)],
)
def test_cancelled_request_waits_in_its_last_stage_or_for_a_silent_worker(
    stage: Stage | None, left: float, expected: Stage
) -> None:
    stream, session = _stream(), _session(4.0)
    _submit(stream, 4.0)
    if stage is not None:
        _enter(stream, stage, session)
    stream.account_leave(session, left)
    stream.account_end(left, left)
    assert stream.ledger.parts(left) == {Stage.PREPARE: 1.0, Stage.QUEUE: 3.0, expected: left - 4.0}


def test_lost_attempts_are_divided_until_their_last_token() -> None:
    stream = _stream()
    _submit(stream, 1.0)
    _produce(stream, 5, 3.0)
    _enter(stream, Stage.DECODE, _session(2.0, decode=5.0), prefill=1.0)
    for number, lost in enumerate((4.0, 9.0)):
        stream.assembly.append(stream.assembly.num_tokens, [6 + number], lost)
        stream.account_leave(_session(lost, decode=6.0), lost + 2.0)
        stream.attempts.end(stream.assembly.num_tokens, lost + 2.0, Loss.SILENT)
        stream.account_loss()
        _submit(stream, lost + 3.0)
        stream.assembly.begin_attempt()
        _enter(stream, Stage.DECODE, _session(lost + 4.0, decode=5.0), worker_queue=0.25, prefill=0.5)
        _produce(stream, 8 + number, lost + 4.0)
    stream.assembly.times.report = _report(14.0, worker_queue=0.25, prefill=0.5, decode=1.0)
    stream.account_end(14.0, written=0.0)
    assert _parts(stream, 14.0) == {
        Stage.PREPARE: 1.0,
        Stage.PREFILL: 1.0,
        Stage.DECODE: 3.0,
        Stage.WIRE: 1.0,
        Stage.RECOVERING: 8.0,
    }


@pytest.mark.proto_field("Blame.is_other_tenant")
@pytest.mark.parametrize(
    ("tenant", "shown"), [("mine", pb.Blame(request_id="b")), ("other", pb.Blame(is_other_tenant=True))]
)
def test_blamed_request_has_its_id_for_its_own_tenant_only(tenant: str, shown: pb.Blame) -> None:
    stream = _stream()
    stream.ledger.blame(Stage.QUEUE, Blame("b", tenant, 1.0))
    _submit(stream, 3.0)
    _produce(stream, 5, 4.0)
    stream.assembly.finish(wpb.SequenceEnd(end_pos=4, reason=wpb.END_REASON_EOS))
    shown.duration.seconds = 1
    assert [part.blame for part in _timings(stream, 4.0).parts if part.HasField("blame")] == [shown]
