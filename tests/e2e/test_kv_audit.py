"""The comparison of KV blocks between scripted workers: who is asked, who is taken out, and what is left behind."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf import json_format

from common.wire.kv_digests import block_names
from router.audit import kv_auditor as kv_auditing
from router.audit.answer_auditor import AuditOptions
from router.audit.kv_auditor import KvAuditor
from tests.e2e.fake_worker import BLOCK_SIZE, FakeWorker
from tests.e2e.router_bench import FILES, bench, collect, request, until

INTAKES = wpb.INTAKE_OPEN, wpb.INTAKE_CORDONED, wpb.INTAKE_EVICTING


def right(sequence: wpb.SubmitSequence, place: int) -> int:
    """Of the tokens up to the block's end, and of nothing else."""
    ids = list(sequence.token_ids)[: (place + 1) * BLOCK_SIZE]
    return xxhash.xxh64_intdigest(json.dumps(ids).encode())


def wrong(sequence: wpb.SubmitSequence, place: int) -> int:
    return right(sequence, place) ^ (1 if place else 0)


def passing(sequence: wpb.SubmitSequence, place: int) -> int:
    """As behind a flipped bit in a block of its cache: without the cache it computes what is right."""
    return (right if sequence.cache_salt else wrong)(sequence, place)


def silent_when_asked(kv: Callable[[wpb.SubmitSequence, int], int]) -> Callable[[wpb.SubmitSequence, int], int | None]:
    """What is computed anew for a dispute has a cache salt, and no request of these tests has."""
    return lambda sequence, place: None if sequence.cache_salt else kv(sequence, place)


def fleet(count: int) -> list[FakeWorker]:
    return [FakeWorker(FILES, worker_id=f"w{i}", kv=right) for i in range(count)]


def auditor(b: Any) -> KvAuditor:
    found: KvAuditor = b.router._kv_auditor
    return found


def prompt(number: int, **fields: Any) -> pb.GenerateRequest:
    ids = [5 + (number + i) % 20 for i in range(3 * BLOCK_SIZE + 4)]
    made = request(request_id=f"r{number}", params={"max_tokens": 3}, **fields)
    made.token_ids.ids.extend(ids)
    return made


async def ask(b: Any, count: int, until_true: Callable[[], object] = lambda: False) -> None:
    """The same few prompts again and again, each worker in its turn."""
    for number in range(count):
        await collect(b.stub.Generate(prompt(number // len(b.workers))))
        if until_true():
            return


async def settled(b: Any, result: str) -> None:
    """Asks until workers differ, and no further: what else is said of the block could be taken for an answer."""
    await ask(b, 60, lambda: auditor(b)._task)
    await until(lambda: auditor(b).counts[result])
    assert auditor(b).counts.total() == auditor(b).counts[result]


async def test_audit_asks_no_third_worker_while_two_agree() -> None:
    workers = fleet(3)
    async with bench(*workers, placement="round_robin") as b:
        await ask(b, 18)
        await until(lambda: auditor(b).check.counts.total() == 18 * 3)
        assert auditor(b).check.counts["equal"] > auditor(b).check.counts["first"] > 0
        assert not auditor(b).check.counts["different"]
        assert not +auditor(b).counts
        assert sum(len(worker.submitted) for worker in workers) == 18
        await b.empty()


async def test_failed_kv_comparison_disturbs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = [], []

    def fail(*arguments: object) -> None:
        asked.append(arguments)
        raise RuntimeError("no observer")

    async with bench(*fleet(2), placement="round_robin") as b:
        pool = b.router.pool
        monkeypatch.setattr(pool, "on_kv_digests", fail)
        down = pool.session_down

        def session_down(*arguments: Any) -> None:
            ended.append(arguments)
            down(*arguments)

        monkeypatch.setattr(pool, "session_down", session_down)
        await ask(b, 6)
        await until(lambda: asked)
        await ask(b, 6)
        assert not ended
        await b.empty()


@pytest.mark.parametrize("fault", [wrong, passing])
@pytest.mark.parametrize("faulty", [0, 1, 2])
async def test_kv_audit_of_three_workers_evicts_wrong_one(faulty: int, fault: Any, tmp_path: Path) -> None:
    workers = fleet(3)
    workers[faulty].kv = fault
    options = AuditOptions(audit_dir=tmp_path / "wrong")
    async with bench(*workers, placement="round_robin", audit=options) as b:
        await settled(b, "failed")
        await until(lambda: b.ready_workers() == 2)
        assert [worker.intake for worker in workers].count(wpb.INTAKE_EVICTING) == 1
        assert workers[faulty].intake == wpb.INTAKE_EVICTING
        # The answer of a worker that was right, with the digests of all its logits: the other one can be held to it.
        await until(lambda: any(path.read_text() for path in (tmp_path / "wrong").glob("*")))
        (path,) = (tmp_path / "wrong").iterdir()
        assert path.stat().st_mode & 0o077 == 0
        proof = json_format.ParseDict(json.loads(path.read_text()), pb.ReplayRequest())
        assert (proof.worker_id, proof.receipt.logits_every) == (f"w{faulty}", 1)
        proof.worker_id = ""
        assert (await b.stub.Replay(proof)).verdict == pb.REPLAY_VERDICT_EQUAL
        await b.empty()


async def test_kv_audit_compares_equal_tokens_across_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tenants with separate salts use three workers; operators see no names of blocks."""
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(kv_auditing.log, "error", lambda event, **fields: said.append(fields))
    workers = [FakeWorker(FILES, worker_id=f"w{i}", kv=right, description={"hash_seed": 77}) for i in range(3)]
    workers[1].kv = wrong
    options = AuditOptions(audit_dir=tmp_path / "wrong")
    async with bench(*workers, placement="round_robin", audit=options) as b:
        for tenant in range(3):
            await collect(b.stub.Generate(prompt(0, cache_salt=f"secret of {tenant}")))
        await until(lambda: workers[1].intake == wpb.INTAKE_EVICTING)
        await until(lambda: said)
        sent = {bytes(name) for _, name in auditor(b).check._said}
        assert all(len(worker.submitted) >= 1 for worker in workers)
        await b.empty()
    assert sent == set(block_names(array("I", prompt(0).token_ids.ids), BLOCK_SIZE, 77))
    shown = [said[0]["block"], *(path.name for path in (tmp_path / "wrong").iterdir())]
    assert len(shown) == 2
    for name in sent:
        for size in (4, 8, 16):
            assert not any(name[:size].hex() in text for text in shown)


async def test_self_contradicting_worker_of_two_is_evicted() -> None:
    workers = fleet(2)
    workers[1].kv = passing
    async with bench(*workers, placement="round_robin") as b:
        await settled(b, "failed")
        await until(lambda: workers[1].intake == wpb.INTAKE_EVICTING)
        assert workers[0].intake == wpb.INTAKE_OPEN
        await b.empty()


async def test_audit_of_two_consistent_workers_cordons_one() -> None:
    workers = fleet(2)
    workers[1].kv = wrong
    async with bench(*workers, placement="round_robin") as b:
        await settled(b, "suspected")
        await until(lambda: b.ready_workers() == 1)
        assert sorted(worker.intake for worker in workers) == [wpb.INTAKE_OPEN, wpb.INTAKE_CORDONED]
        # The other one is the last: whatever it says, it stays.
        await ask(b, 4)
        assert b.ready_workers() == 1
        await b.empty()


async def test_worker_with_two_digests_of_one_block_is_evicted() -> None:
    """Other workers have no say in it."""
    workers = fleet(2)
    workers[1].kv = None
    async with bench(*workers, placement="round_robin") as b:
        workers[0].digests = [wpb.KvDigest(name=b"n" * 16, digest=digest) for digest in (1, 1, 2)]
        await until(lambda: workers[0].intake == wpb.INTAKE_EVICTING)
        assert +auditor(b).counts == {"failed": 1}


async def test_kv_dispute_without_request_needs_three_workers() -> None:
    """Another router had the request, so this one cannot decide between two workers."""
    workers = fleet(3)
    async with bench(*workers) as b:
        workers[0].digests = [wpb.KvDigest(name=b"n" * 16, digest=1)]
        workers[1].digests = [wpb.KvDigest(name=b"n" * 16, digest=2)]
        await until(lambda: auditor(b).counts["unanswered"] == 1)
        assert [worker.intake for worker in workers] == [wpb.INTAKE_OPEN] * 3
        workers[2].digests = [wpb.KvDigest(name=b"n" * 16, digest=2)]
        await until(lambda: workers[0].intake == wpb.INTAKE_EVICTING)
        assert [worker.intake for worker in workers[1:]] == [wpb.INTAKE_OPEN] * 2


async def test_worker_failing_to_answer_audit_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_auditing, "KV_DIGEST_WAIT_S", 0.1)
    workers = fleet(2)
    for worker, kv in zip(workers, (right, wrong), strict=True):
        worker.kv = silent_when_asked(kv)
    async with bench(*workers, placement="round_robin") as b:
        await settled(b, "error")
        assert auditor(b).counts["error"] == 1
        assert [worker.intake for worker in workers] == [wpb.INTAKE_OPEN] * 2


async def test_kv_audit_off_compares_nothing() -> None:
    workers = fleet(2)
    workers[1].kv = wrong
    async with bench(*workers, placement="round_robin", audit=AuditOptions(audit_kv=False)) as b:
        await ask(b, 8)
        await until(lambda: not any(worker.digests for worker in workers))
        assert b.router._kv_auditor is None
        assert [worker.intake for worker in workers] == [wpb.INTAKE_OPEN] * 2
        await b.empty()
