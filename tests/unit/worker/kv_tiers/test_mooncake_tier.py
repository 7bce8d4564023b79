"""The Mooncake tier over a double of its library: one that blocks, lies, fails or ends its process costs a miss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from worker.engine.sequence import Sequence
from worker.engine.tier_lookups import NAME_BYTES, Tiers, root_name
from worker.kv_tiers import mooncake_tier
from worker.kv_tiers.mooncake_process import NUM_SLOTS, MooncakeSettings
from worker.kv_tiers.mooncake_tier import (
    LOGGED_LINES,
    LONGEST_WAIT_S,
    MooncakeError,
    MooncakeTier,
    read_settings,
)
from worker.kv_tiers.tier_option import is_shared, open_tiers
from worker.kv_tiers.tiers import DAMAGED, FAILED, HEADER_BYTES, HIT, MISS, STORED, KvTiers

MASTER = "mooncake://127.0.0.1:50051"
NAME = bytes(range(NAME_BYTES))
# `mooncake.store`: values are files beside it, and the file `mood` says how it behaves.
DOUBLE = """
import ctypes, json, os, pathlib, threading, time

FOLDER = pathlib.Path(__file__).parent


def mood():
    return (FOLDER / "mood").read_text()


class MooncakeDistributedStore:
    def setup(self, *arguments):
        (FOLDER / "setup").write_text(json.dumps(arguments))
        if mood().startswith("prints"):
            os.write(1, b"to stdout\\n")
            os.write(2, b"E1127 client.cpp:1] " + bytes([255]) * 5000 + b"\\n" + b"again\\n" * int(mood()[7:]))
        return -1 if mood() == "no master" else 0

    def register_buffer(self, address, size):
        return 0

    def get_into(self, key, address, size):
        self.behave()
        path = FOLDER / key.replace(":", "_")
        if not path.exists():
            return -704
        value = bytearray(path.read_bytes())
        if mood() == "lies":
            value[len(value) // 2] ^= 1
        if mood() == "cuts off":
            value = value[: len(value) // 2]
        if len(value) > size:
            return -600
        ctypes.memmove(address, bytes(value), len(value))
        return len(value)

    def put_from(self, key, address, size):
        self.behave()
        if mood() == "full":
            return -200
        (FOLDER / key.replace(":", "_")).write_bytes(ctypes.string_at(address, size))
        return 0

    def remove(self, key, force):
        self.behave()
        path = FOLDER / key.replace(":", "_")
        if not path.exists():
            return -704
        path.unlink()
        return 0

    def behave(self):
        while mood() == "hangs":
            time.sleep(0.01)
        if mood() == "hangs for good":
            (FOLDER / f"hung {threading.get_ident()}").touch()
            threading.Event().wait()
        if mood() == "aborts":
            os.abort()
"""


class Library:
    """The double of the library, in a folder where it is found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "store.py").write_text(DOUBLE)
        self.behave("well")

    def behave(self, mood: str) -> None:
        """Has the library behave so from now on. The file appears whole."""
        (self.folder / "next").write_text(mood)
        (self.folder / "next").replace(self.folder / "mood")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(mooncake_tier, "TIMEOUT_S", 60.0)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return Library(tmp_path / "mooncake")


@pytest.fixture
def tier(library: Library) -> Iterator[MooncakeTier]:
    made = MooncakeTier(MooncakeSettings("127.0.0.1:50051"), 64)
    yield made
    made.close()


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def answers(tier: MooncakeTier) -> bool:
    try:
        tier.get(bytes(NAME_BYTES))
    except MooncakeError:
        return False
    return True


def test_values_are_kept_read_and_dropped(library: Library, tier: MooncakeTier) -> None:
    values = {bytes([i]) * NAME_BYTES: os.urandom(64) for i in range(3 * NUM_SLOTS)}
    assert all(tier.put(name, b"", value) for name, value in values.items())
    assert {name: tier.get(name) for name in values} == values
    assert tier.get(NAME) is None
    first = next(iter(values))
    tier.drop(first)
    tier.drop(first)
    assert tier.get(first) is None
    library.behave("full")
    assert not tier.put(NAME, b"", b"value")


@pytest.mark.parametrize("mood", ["lies", "cuts off"])
def test_wrong_value_of_store_is_damaged_and_leaves_it(library: Library, mood: str) -> None:
    tiers = KvTiers(open_tiers(MASTER, 16), 16)
    tiers.store([(NAME, b"", bytes(16))])
    until(lambda: tiers.counts().get(("mooncake", STORED), 0) == 1)
    library.behave(mood)
    assert fetched(tiers) == []
    library.behave("well")
    assert fetched(tiers) == []
    assert (tiers.counts().get(("mooncake", DAMAGED), 0), tiers.counts().get(("mooncake", MISS), 0)) == (1, 1)
    tiers.close()


def fetched(tiers: KvTiers) -> list[bytes]:
    fetch = tiers.fetch([NAME])
    assert fetch is not None
    until(lambda: fetch.is_done)
    fetch.close()
    return fetch.blocks


def test_library_that_hangs_fails_calls_until_it_answers(
    library: Library, tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(NAME, b"", b"value")
    process = tier.pid
    library.behave("hangs")
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_tier, "TIMEOUT_S", 0.01)
        with pytest.raises(MooncakeError, match="not answered within"):
            tier.get(NAME)
    library.behave("well")
    assert tier.get(NAME) == b"value"
    assert tier.pid == process


def test_process_that_hangs_takes_no_more_calls_than_slots(tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(tier.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_tier, "TIMEOUT_S", 0.01)
        for _ in range(NUM_SLOTS):
            with pytest.raises(MooncakeError, match="not answered within"):
                tier.get(NAME)
    with pytest.raises(MooncakeError, match="not answered the last"):
        tier.get(NAME)
    os.kill(tier.pid, signal.SIGCONT)
    until(lambda: answers(tier))
    assert tier.get(NAME) is None


def test_process_that_hangs_for_good_is_replaced(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    tier = MooncakeTier(MooncakeSettings("127.0.0.1:50051"), 64, lambda: now)
    tier.put(NAME, b"", b"value")
    process = tier.pid
    library.behave("hangs for good")
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_tier, "TIMEOUT_S", 0.01)
        for _ in range(NUM_SLOTS):
            with pytest.raises(MooncakeError, match="not answered within"):
                tier.get(NAME)
            now += LONGEST_WAIT_S
    until(lambda: len(list(library.folder.glob("hung *"))) == NUM_SLOTS)
    library.behave("well")
    with pytest.raises(MooncakeError, match="not answered the last"):
        tier.get(NAME)
    assert tier.pid == process
    now += 0.1
    assert tier.get(NAME) == b"value"
    assert tier.pid != process
    assert not Path(f"/proc/{process}").exists()
    tier.close()


@pytest.mark.parametrize("death", ["aborts", "is killed"])
def test_process_that_ends_is_started_again(library: Library, tier: MooncakeTier, death: str) -> None:
    tier.put(NAME, b"", b"value")
    process = tier.pid
    if death == "aborts":
        library.behave(death)
        with pytest.raises(MooncakeError, match="has ended"):
            tier.get(NAME)
        library.behave("well")
    else:
        os.kill(process, signal.SIGKILL)
    until(lambda: answers(tier) and tier.pid != process)
    assert tier.get(NAME) == b"value"


def test_process_without_a_master_ends_and_tries_again(library: Library) -> None:
    library.behave("no master")
    tier = MooncakeTier(MooncakeSettings("127.0.0.1:50051"), 64)
    assert not answers(tier)
    assert not answers(tier)
    library.behave("well")
    until(lambda: answers(tier))
    tier.close()


def test_closed_tier_leaves_no_process_and_starts_none(tier: MooncakeTier) -> None:
    process = tier.pid
    tier.close()
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(MooncakeError, match="has ended"):
        tier.get(NAME)
    assert tier.pid == process


def test_close_returns_while_killed_process_still_runs(tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a system call on a network card: the signal has no effect yet."""
    process = tier.pid
    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(mooncake_tier, "END_S", 0.01)
        patched.setattr(tier._client._process, "kill", lambda: None)
        tier.close()
    assert Path(f"/proc/{process}").exists()
    assert {"event": "Mooncake's client was killed and still runs", "log_level": "warning", "pid": process} == {
        key: value for [line] in [lines] for key, value in line.items() if key != "waited_s"
    }
    tier.close()
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("mood", ["well", "lies", "hangs", "aborts"])
def test_no_request_waits_for_the_library(library: Library, mood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = KvTiers(open_tiers(MASTER, 16 * BLOCK), 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens = prompts(40)[0]
    first = Sequence(tokens, BLOCK, arrive_time=time.monotonic())
    core.add_request(first)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: tiers.counts().get(("mooncake", STORED), 0) > 0)
    library.behave(mood)
    if mood == "hangs":
        monkeypatch.setattr(mooncake_tier, "TIMEOUT_S", 0.01)
    core.scheduler.block_manager.flush()
    again = Sequence(tokens, BLOCK, arrive_time=time.monotonic())
    core.add_request(again)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert again.completion_token_ids == first.completion_token_ids
    wanted = {"well": HIT, "lies": DAMAGED, "hangs": FAILED, "aborts": FAILED}[mood]
    until(lambda: tiers.counts().get(("mooncake", wanted), 0) > 0)
    library.behave("well")
    tiers.close()


def test_lines_of_the_library_are_events_of_the_worker(library: Library, capfd: pytest.CaptureFixture[str]) -> None:
    library.behave("prints 100000")
    with capture_logs() as lines:
        tier = MooncakeTier(MooncakeSettings("127.0.0.1:50051"), 64)
        # The process has printed all, which its pipe alone cannot hold.
        assert tier.get(NAME) is None
        until(lambda: len(lines) >= LOGGED_LINES)
        tier.close()
    shown = [line for line in lines if line["event"] == "Mooncake's client printed a line"]
    assert {line["pid"] for line in shown} == {tier.pid}
    assert [line["line"] for line in shown[:2]] == ["to stdout", "E1127 client.cpp:1] " + "\ufffd" * 980]
    assert shown[10]["line"] == "again"
    # Two minutes may be counted.
    assert len(shown) <= 2 * LOGGED_LINES
    assert capfd.readouterr() == ("", "")


def test_option_names_what_the_library_is_given(library: Library) -> None:
    settings = read_settings(
        "mooncake://[::1]:50051?segment=2GiB&protocol=rdma&device=mlx5_0&device=mlx5_1&host=10.0.0.7"
    )
    assert settings == MooncakeSettings("[::1]:50051", 2 << 30, "rdma", "mlx5_0,mlx5_1", "10.0.0.7")
    assert settings.reached_at() == "10.0.0.7"
    assert MooncakeSettings("127.0.0.1:50051").reached_at() == "127.0.0.1"
    assert is_shared(MASTER)
    made = open_tiers(f"{MASTER}?segment=1MiB", HEADER_BYTES + 16)["mooncake"]
    until((library.folder / "setup").is_file)
    made.close()
