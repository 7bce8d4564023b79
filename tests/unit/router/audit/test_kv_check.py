"""Digests of KV blocks are compared between comparable workers, within bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.audit.decide import Ask, Wrong
from router.audit.kv_check import MAX_WITNESSES, Dispute, KvCheck, Witness

CLASS = ("model", "numerics")
ALL = [f"w{i}" for i in range(MAX_WITNESSES + 4)]


def witness(number: int, instance: str = "first", kv_class: tuple[str, str] = CLASS) -> Witness:
    return Witness(f"w{number}", instance, kv_class)


def take(check: KvCheck, said: Witness, digest: int, name: bytes = b"n", accepting: list[str] = ALL) -> Dispute | None:
    return check.take(said, name, digest, accepting)


def test_workers_with_equal_kv_digests_agree() -> None:
    check = KvCheck()
    assert [take(check, witness(i), 7) for i in (0, 1, 2, 0)] == [None] * 4
    assert dict(check.counts) == {"first": 1, "equal": 3}


def test_kv_check_skips_other_classes_blocks_and_closed_workers() -> None:
    check = KvCheck()
    assert take(check, witness(0), 7) is None
    assert take(check, witness(1, kv_class=("model", "others")), 8) is None
    assert take(check, witness(2), 8, name=b"other") is None
    assert take(check, witness(3), 8, accepting=["w1", "w2", "w3"]) is None
    assert take(check, witness(4), 8, accepting=["w0", "w3"]) is None
    # Now both differing workers are present.
    assert take(check, witness(0), 7) is not None


def test_kv_check_ignores_digests_of_old_instance() -> None:
    """A worker that returns on another machine or after a repair is a new instance."""
    check = KvCheck()
    assert take(check, witness(0), 7) is None
    assert take(check, witness(0, "second"), 8, name=b"other") is None
    assert take(check, witness(1), 8) is None
    assert take(check, witness(0, "second"), 8) is None
    assert not check.counts["different"]


def test_worker_with_two_digests_contradicts_itself() -> None:
    check = KvCheck()
    take(check, witness(0), 7)
    dispute = take(check, witness(0), 8)
    assert dispute is not None
    assert dispute.contradicts_itself


def test_kv_check_forgets_digest_before_recheck() -> None:
    check = KvCheck()
    take(check, witness(0), 7)
    take(check, witness(1), 7)
    check.forget(CLASS, b"n", "w0")
    check.forget(CLASS, b"never said", "w2")
    assert check.digest(witness(0), b"n") is None
    assert check.digest(witness(1), b"n") == (7).to_bytes(8, "little")
    dispute = take(check, witness(0), 8)
    assert dispute is not None
    assert not dispute.contradicts_itself
    assert check.digest(witness(0), b"n") == (8).to_bytes(8, "little")


def test_differing_kv_digests_need_third_worker() -> None:
    check = KvCheck()
    take(check, witness(0), 7)
    dispute = take(check, witness(1), 8)
    assert dispute is not None
    assert not dispute.contradicts_itself
    assert dispute.case.next(["w0", "w1", "w2"]) == Ask("w2")


@given(st.data())
def test_kv_check_of_three_blames_differing_worker(data: st.DataObject) -> None:
    """In any order and mixed with other blocks; one worker is faulty, sometimes or always."""
    check = KvCheck()
    workers = data.draw(st.integers(1, 6))
    faulty = data.draw(st.integers(0, workers - 1))
    spoken: dict[tuple[int, bytes], int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        number, name = data.draw(st.integers(0, workers - 1)), data.draw(st.sampled_from([b"a", b"b"]))
        digest = data.draw(st.integers(0, 2)) if number == faulty else 0
        dispute = take(check, witness(number), digest, name)
        others = {other: said for (other, of), said in spoken.items() if of == name}
        own = others.pop(number, digest)
        differs = own != digest or any(said != digest for said in others.values())
        assert (dispute is not None) == differs
        spoken[number, name] = digest
        if dispute is None:
            continue
        if dispute.contradicts_itself:
            assert dispute.case.answer.worker_id == f"w{faulty}"
            continue
        decision = dispute.case.next([f"w{i}" for i in range(workers)])
        if len(others) >= 2:
            assert decision == Wrong(f"w{faulty}", is_certain=True)
        else:
            assert isinstance(decision, Ask)


def test_kv_check_memory_is_bounded() -> None:
    check = KvCheck(capacity=5)
    for block in range(50):
        name = block.to_bytes(2, "big")
        for number in range(MAX_WITNESSES + 3):
            take(check, witness(number), 1, name)
    assert len(check) == 5
    assert all(len(said) == MAX_WITNESSES for said in check._said.values())
    # The most recently reported blocks.
    assert check.digest(witness(MAX_WITNESSES), (49).to_bytes(2, "big")) == (1).to_bytes(8, "little")
    assert check.digest(witness(MAX_WITNESSES), (44).to_bytes(2, "big")) is None
    assert check.digest(witness(MAX_WITNESSES, "second"), (49).to_bytes(2, "big")) is None
