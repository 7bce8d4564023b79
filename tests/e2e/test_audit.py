"""The audit of a router with scripted workers: who is asked, who is taken out, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf import json_format

from common.params.options.types import Fraction
from router.api.admin import shown_options
from router.app import router
from router.audit.answer_auditor import AnswerAuditor, AuditOptions
from router.options import RouterOptions
from router.scheduling.failover import FailoverOptions
from tests.e2e.fake_worker import FakeWorker, letters
from tests.e2e.router_bench import FILES, bench, collect, request, until
from tests.e2e.test_contract import resumed

ALL = AuditOptions(1.0)


def wrong(_: wpb.SubmitSequence) -> list[int]:
    ids = letters(wpb.SubmitSequence())[:50]
    return [*ids[:4], ids[4] + 1, *ids[5:]]


def auditor(b: Any) -> AnswerAuditor:
    found: AnswerAuditor = b.router._auditor
    return found


async def audited(b: Any, result: str, count: int = 1) -> None:
    await until(lambda: auditor(b).counts[result] == count)
    assert sum(auditor(b).counts.values()) == count


async def has_audited(b: Any, count: int) -> None:
    await until(lambda: sum(auditor(b).counts.values()) == count)


def fleet(count: int) -> list[FakeWorker]:
    return [FakeWorker(FILES, worker_id=f"w{i}") for i in range(count)]


async def test_audit_recomputes_answers_on_another_worker_at_low_priority() -> None:
    workers = fleet(3)
    async with bench(*workers, audit=ALL) as b:
        asked = request(request_id="r", session_id="s", priority=pb.PRIORITY_HIGH, params={"max_tokens": 9, "n": 2})
        parts = await collect(b.stub.Generate(asked))
        await audited(b, "passed", 2)
        for index in (0, 1):
            (answered_by,) = {
                part.finish.worker_id for part in parts if part.index == index and part.HasField("finish")
            }
            first, second = sorted(
                ((s.cache_salt, w.worker_id, s) for w in workers for s in w.submitted if s.choice == index),
                key=lambda found: found[0],
            )
            assert (first[0], first[1]) == (b"", answered_by)
            assert second[1] != answered_by
            assert second[2].priority == wpb.PRIORITY_LOW
            assert (second[2].seed, second[2].params) == (first[2].seed, first[2].params)
            assert list(second[2].token_ids) == list(first[2].token_ids)
        await b.empty()


@pytest.mark.parametrize("faulty", [0, 1, 2])
async def test_audit_of_three_workers_evicts_wrong_one_and_keeps_proof(faulty: int, tmp_path: Path) -> None:
    workers = fleet(3)
    workers[faulty].answer = wrong
    async with bench(*workers, audit=AuditOptions(1.0, tmp_path / "wrong")) as b:
        for i in range(40):
            await collect(b.stub.Generate(request(request_id=f"r{i}", params={"max_tokens": 9})))
            if auditor(b).counts["failed"]:
                break
            await has_audited(b, i + 1)
        await until(lambda: b.ready_workers() == 2)
        assert [worker.intake for worker in workers].count(wpb.INTAKE_EVICTING) == 1
        assert workers[faulty].intake == wpb.INTAKE_EVICTING
        assert auditor(b).counts["suspected"] == 0
        (path,) = (tmp_path / "wrong").iterdir()
        assert path.stat().st_mode & 0o077 == 0
        proof = json_format.ParseDict(json.loads(path.read_text()), pb.ReplayRequest())
        proof.worker_id = ""
        found = await b.stub.Replay(proof)
        is_answer_wrong = proof.token_ids.ids[4] != letters(wpb.SubmitSequence())[4]
        expected = pb.REPLAY_VERDICT_CHOICE_DIFFERS if is_answer_wrong else pb.REPLAY_VERDICT_EQUAL
        assert found.verdict == expected
        await b.empty()


async def test_audit_of_two_workers_cordons_answering_one() -> None:
    workers = fleet(2)
    workers[0].answer = wrong
    async with bench(*workers, audit=ALL) as b:
        parts = await collect(b.stub.Generate(request(params={"max_tokens": 9})))
        await audited(b, "suspected")
        await until(lambda: b.ready_workers() == 1)
        answered_by = int(parts[-1].finish.worker_id[1:])
        assert [worker.intake == wpb.INTAKE_CORDONED for worker in workers] == [i == answered_by for i in range(2)]
        # The next answer is of the last worker: nobody is there to compute it again, and it is never taken out.
        await collect(b.stub.Generate(request(params={"max_tokens": 9})))
        await until(lambda: auditor(b).counts["unanswered"] == 1)
        assert b.ready_workers() == 1
        await b.empty()


async def test_self_contradicting_worker_of_two_is_evicted() -> None:
    """The worker acts as after a flipped bit in a cached block: without the cache it computes the right answer."""
    workers = fleet(2)
    for worker in workers:
        worker.answer = lambda sequence: letters(sequence) if sequence.cache_salt else wrong(sequence)
    async with bench(*workers, audit=ALL) as b:
        parts = await collect(b.stub.Generate(request(params={"max_tokens": 9})))
        await audited(b, "failed")
        answered_by = workers[int(parts[-1].finish.worker_id[1:])]
        await until(lambda: answered_by.intake == wpb.INTAKE_EVICTING)
        await b.empty()


async def test_audit_compares_requested_logit_digests() -> None:
    workers = fleet(3)
    workers[0].logits = lambda position: 7 * position + (position == 8)
    async with bench(*workers, audit=ALL) as b:
        for i in range(40):
            asked = request(request_id=f"r{i}", params={"max_tokens": 9})
            asked.output_options.receipt.logits_every = 1
            await collect(b.stub.Generate(asked))
            await has_audited(b, i + 1)
            if auditor(b).counts["failed"]:
                break
        await until(lambda: workers[0].intake == wpb.INTAKE_EVICTING)
        assert [worker.intake for worker in workers[1:]] == [wpb.INTAKE_OPEN] * 2


async def test_resumed_answers_and_lost_workers_blame_no_worker() -> None:
    workers = fleet(2)
    async with bench(*workers, audit=ALL, failover=FailoverOptions(worker_wait_s=0.3)) as b:
        asked = request(request_id="r", params={"max_tokens": 9})
        parts = await collect(b.stub.Generate(asked))
        await audited(b, "passed")
        forged = resumed(asked, parts[:4], by="token_ids")
        forged.resume.answers[0].token_ids.ids[1] += 1
        await collect(b.stub.Generate(forged))
        # The other worker goes while it computes the answer again.
        for worker in workers:
            worker.step_s = 0.01
        parts = await collect(b.stub.Generate(request(request_id="s", params={"max_tokens": 9})))
        other = workers[1 - int(parts[-1].finish.worker_id[1:])]
        await other.stop()
        await has_audited(b, 2)
        assert not auditor(b).counts["failed"] + auditor(b).counts["suspected"]
        assert [worker.intake for worker in workers] == [wpb.INTAKE_OPEN] * 2


async def test_audit_off_recomputes_nothing() -> None:
    workers = fleet(2)
    async with bench(*workers) as b:
        await collect(b.stub.Generate(request(params={"max_tokens": 9})))
        await b.empty()
        assert b.router._auditor is None
        assert sum(len(worker.submitted) for worker in workers) == 1


def test_shown_options_have_command_line_names(tmp_path: Path) -> None:
    shown = shown_options(RouterOptions(workers=["127.0.0.1:1"], audit=AuditOptions(0.001, tmp_path)))
    assert (shown["audit"], shown["audit-dir"]) == ("0.1%", str(tmp_path))
    assert (shown["failover"], shown["worker"]) == ("exact", "127.0.0.1:1")
    assert {f"--{name}" for name in shown} <= {name for option in router.params for name in option.opts}


@pytest.mark.parametrize(("text", "fraction"), [("0.1%", 0.001), ("0.001", 0.001), ("100%", 1.0), ("0", 0.0)])
def test_fractions_are_read(text: str, fraction: float) -> None:
    assert Fraction().convert(text, None, None) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["", "%", "x", "101%", "-1", "nan", "1.5"])
def test_audit_fraction_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Fraction().convert(text, None, None)
