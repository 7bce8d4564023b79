"""The engine's end of its ranks, against ranks that speak the protocol and misbehave on purpose."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from tests.checkpoints import make_checkpoint
from tests.e2e.service import free_port
from worker.config.model_config import ModelConfig, ModelError
from worker.config.shares import check_heads
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.progress import StartProgress
from worker.ranks import rank_client, rank_process
from worker.ranks.batch_delta import BatchDecoder
from worker.ranks.door import knock
from worker.ranks.frames import FrameReader, encode, receive
from worker.ranks.rank_client import RankGroup
from worker.ranks.rank_peers import Peer, RankLostError
from worker.ranks.rank_process import Link
from worker.ranks.rank_setup import load_ranks
from worker.ranks.topology import Topology

BEAT_S = 0.02
# Bytes of a KV block on each rank, and the draft model's part of them.
SLICES = (3, 5)
DRAFT_BYTES = 2
# Heartbeat interval of the engine's watch.
HEARTBEAT_S = 0.25


class FakeRank:
    """Answers calls as told, and sends heartbeats while `alive`.

    Attributes:
        calls: names and arguments, as they came.
        answer: from (name, arguments) to the answer; may wait or raise.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Callable[..., Any] = self.usual
        self.alive = True
        self.decoder = BatchDecoder()
        self.reading = threading.Event()
        self.reading.set()
        self._sock = sock
        for work in (self._serve, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def usual(self, name: str, *arguments: Any) -> Any:
        if name == "forward":
            ids = self.decoder.decode(*arguments).req_ids
            return (ScheduledBatchOutput({seq_id: (seq_id,) for seq_id in ids}), 0.25) if self.rank == 0 else None
        return [self.rank, name]

    def send(self, *message: object) -> None:
        self._sock.sendall(encode(message))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        reader = FrameReader()
        try:
            while True:
                self.reading.wait()
                for serial, name, *arguments in receive(self._sock, reader):
                    self.calls.append((name, *arguments))
                    answer = self.answer(name, *arguments)
                    if answer is not None:
                        self.send("done", serial, answer)
        except (EOFError, OSError):
            pass

    def _beat(self) -> None:
        try:
            while True:
                time.sleep(BEAT_S)
                if self.alive:
                    self.send("beat")
        except OSError:
            pass


class Recorded(StartProgress):
    """Records every progress report."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[object, ...]] = []

    def bytes(self, done: int, total: int) -> None:
        self.told.append(("bytes", done, total))

    def count(self, done: int, total: int) -> None:
        self.told.append(("count", done, total))

    def stage(self, name: str) -> None:
        self.told.append(("stage", name))


class Group(RankGroup):
    """A group on fake ranks."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        self.fakes: list[FakeRank] = []
        self.progress = Recorded()
        super().__init__(Topology(size), "model", 1, self.progress, **options)

    def _spawn(self, rank: int) -> Peer:
        ours, theirs = socket.socketpair()
        self.fakes.append(FakeRank(rank, theirs))
        return Peer(rank, ours)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence for 2 s instead of 4; a busy machine may well keep a thread from its turn for a second."""
    monkeypatch.setattr(rank_client, "RANK_HEARTBEAT_S", HEARTBEAT_S)


@pytest.fixture
def group() -> Iterator[Group]:
    made = started()
    yield made
    made.close()


def started(shares_sums: bool = False, **options: Any) -> Group:
    made = Group(**options)
    made.start()
    made.set_ready(shares_sums, {rank: (whole, DRAFT_BYTES) for rank, whole in enumerate(SLICES)})
    return made


def batch(num_tokens: int = 4) -> ScheduledBatch:
    seq = Sequence(list(range(num_tokens)), 16)
    return ScheduledBatch({seq.id: seq}, [num_tokens], num_tokens)


def test_blocks_of_tiers_are_cut_into_slices_of_ranks_and_joined(group: Group) -> None:
    assert group.kv_block_bytes == sum(SLICES)
    assert group.model_slices == [slice(0, SLICES[0] - DRAFT_BYTES), slice(SLICES[0], sum(SLICES) - DRAFT_BYTES)]
    moved: dict[int, list[tuple[int, bytes]]] = {}

    def answer(fake: FakeRank, name: str, *arguments: Any) -> Any:
        if name != "forward":
            return fake.usual(name, *arguments)
        got = fake.decoder.decode(*arguments)
        moved[fake.rank] = list(got.blocks_up)
        rows = [(*key, bytes([block]) * SLICES[fake.rank]) for block, key in got.blocks_down.items()]
        output = ScheduledBatchOutput({seq_id: (seq_id,) for seq_id in got.req_ids}, blocks_down=rows)
        return (output, 0.25) if rows or fake.rank == 0 else None

    for fake in group.fakes:
        fake.answer = partial(answer, fake)
    step = batch()
    step.blocks_down = {3: (b"third", b""), 5: (b"fifth", b"third")}
    step.blocks_up = [(7, b"aaabbbbb"), (8, b"cccddddd")]
    output = group.forward(step)
    assert output.req_ids == step.req_ids
    assert output.blocks_down == [(b"third", b"", b"\3" * 8), (b"fifth", b"third", b"\5" * 8)]
    assert moved == {0: [(7, b"aaa"), (8, b"ccc")], 1: [(7, b"bbbbb"), (8, b"ddddd")]}
    # Steps without blocks of tiers wait for rank 0 alone.
    assert not group.forward(batch()).blocks_down


def test_ranks_are_called_in_equal_order(group: Group) -> None:
    assert group.call("load", 1) == {0: (0, "load"), 1: (1, "load")}
    batches = [batch() for _ in range(20)]
    steps = [group.submit(each) for each in batches]
    assert [step.result().output.token_ids for step in steps] == [
        {each.req_ids[0]: (each.req_ids[0],)} for each in batches
    ]
    assert all(step.result().duration_s == 0.25 for step in steps)
    assert group.forward(batches[0]).token_ids == {batches[0].req_ids[0]: (batches[0].req_ids[0],)}
    group.call("describe")
    names = [[call[0] for call in fake.calls] for fake in group.fakes]
    assert names[0] == names[1] == ["open_door", "join", "load", *["forward"] * 21, "describe"]


def test_progress_is_the_mean_of_the_ranks(group: Group) -> None:
    group.fakes[0].send("loaded", 10, 100)
    group.fakes[1].send("loaded", 40, 100)
    group.call("load")
    assert group.progress.told[-1] == ("bytes", 25, 100)


@pytest.mark.parametrize("captures", [True, False])
def test_captured_steps_of_rank_0_are_counted(captures: bool, tmp_path: Path) -> None:
    """Ranks capture steps in a stage of its own; steps on GPUs are launched ahead."""
    answers: dict[str, object] = {"load": (1 << 14, 0), "kv_memory": (1 << 24, True), "describe": {"numerics": "n"}}
    answers |= {"share_sums": captures, "warmup": captures}

    class Capturing(Group):
        def _spawn(self, rank: int) -> Peer:
            peer = super()._spawn(rank)
            self.fakes[rank].answer = lambda name, *given: self.answer(rank, name)
            return peer

        def answer(self, rank: int, name: str) -> Any:
            if name == "capture_graphs" and rank == 0:
                for done in (1, 2, 3):
                    self.fakes[0].send("captured", done, 3)
            return answers.get(name, name)

    group, model_config = Capturing(), ModelConfig.from_folder(make_checkpoint(tmp_path, num_hidden_layers=1))
    config, known = load_ranks(group, Config(model=str(tmp_path)), model_config, group.progress)
    group.close()
    told = group.progress.told
    counted = [("count", done, 3) for done in (1, 2, 3)]
    capturing = [("stage", "capturing graphs"), *counted] if captures else []
    assert told[told.index(("stage", "warming up")) + 1 :] == capturing
    assert ("capture_graphs" in [call[0] for call in group.fakes[1].calls]) == captures
    # The second stage uses all ranks, so it begins after all have loaded; a started stage ends.
    calls = [call[0] for call in group.fakes[1].calls]
    assert calls[2:5] == ["load", "share_sums", "kv_memory"]
    assert ("leave" in calls) == captures
    assert known == {"numerics": "n"}
    assert (config.deferred_output, config.num_kvcache_blocks) == (True, (1 << 24) // (1 << 14))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of tensor_parallel_size 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 is not a multiple of tensor_parallel_size 2"),
    ],
)
def test_indivisible_heads_are_refused_before_ranks_start(changes: dict[str, Any], message: str) -> None:
    """Former fault: the error came after all ranks had started, after 9 to 50 s, as an error of rank 1."""
    group, folder = Group(), Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"
    with pytest.raises(ModelError, match=f"^{message}"):
        load_ranks(group, Config(), replace(ModelConfig.from_folder(folder), **changes), group.progress)
    assert not group.fakes
    latent = replace(ModelConfig.from_folder(folder), num_key_value_heads=3, source={"kv_lora_rank": 32})
    check_heads(latent, 2)


def test_healthy_ranks_leave_before_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ranks answer, sooner or later.
    monkeypatch.setattr(rank_client, "RANK_END_S", 60.0)
    group = started(shares_sums=True)
    for _ in range(2):
        group.close()
    assert [fake.calls.count(("leave",)) for fake in group.fakes] == [1, 1]
    lost_one = started(shares_sums=True)
    lost_one.fakes[0].close()
    while lost_one.failure() is None:
        time.sleep(0.01)
    alone = started(shares_sums=False)
    for group in (lost_one, alone):
        group.close()
        assert "leave" not in [call[0] for call in group.fakes[1].calls]


@pytest.mark.parametrize("reads", [True, False])
def test_unresponsive_rank_does_not_delay_close(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rank without an answer nor a rank with a full socket delays it."""
    monkeypatch.setattr(rank_client, "RANK_END_S", 0.2)
    group = started(shares_sums=True)
    group.fakes[1].answer = lambda *call: None
    if not reads:
        group.fakes[1].reading.clear()
        threading.Thread(target=group.submit, args=(batch(400_000),)).start()
        while not group._sending.locked():
            time.sleep(0.001)
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began >= 0.2
    assert group.failure() is not None


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt even where it is ignored: in a job that a shell started with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_during_leave_terminates_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The main thread waits in `close` for as long as it takes.
    monkeypatch.setattr(rank_client, "RANK_END_S", 60.0)
    main = threading.main_thread().ident
    assert main is not None
    sent = threading.Event()

    def interrupt(*call: Any) -> None:
        """Sends a real signal, like a terminal, once ranks must leave; `interrupt_main` would end no wait."""
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(main, signal.SIGINT)

    group = started(shares_sums=True)
    group.fakes[1].answer = interrupt
    with pytest.raises(KeyboardInterrupt):
        group.close()
    assert sent.is_set()
    assert isinstance(group.failure(), RankLostError)
    group.close()


def lost(group: Group, why: str) -> None:
    """Steps in flight and later ones end with the reason, exactly once each."""
    for fake in group.fakes:
        fake.answer = lambda *call: None
    steps = [group.submit(batch()) for _ in range(3)]
    done, hanging = wait(steps, 60)
    assert not hanging
    assert {str(step.exception()) for step in done} == {str(group.failure())}
    with pytest.raises(RankLostError, match=why):
        group.forward(batch())


def test_ended_rank_is_lost(group: Group) -> None:
    threading.Timer(0.1, group.fakes[1].close).start()
    lost(group, "rank 1 on another machine has closed its connection")


def test_frozen_rank_is_lost(group: Group) -> None:
    group.fakes[1].alive = False
    lost(group, "rank 1 has been silent for")


@pytest.mark.slow
def test_loading_rank_may_be_silent_for_longer() -> None:
    group = Group()
    group.start()
    group.fakes[0].alive = group.fakes[1].alive = False
    time.sleep(8 * HEARTBEAT_S + 0.4)
    assert group.failure() is None
    group.close()


def test_hanging_rank_with_heartbeats_is_lost() -> None:
    group = started(step_timeout_s=0.3)
    time.sleep(0.6)
    assert group.failure() is None
    lost(group, "a step took longer than --step-timeout 0.3 s")
    group.close()


@pytest.mark.slow
def test_non_reading_rank_is_lost_in_bounded_time(group: Group) -> None:
    """The rank's socket is full, so the engine waits in the middle of a frame and must get out."""
    group.fakes[1].reading.clear()
    group.fakes[1].alive = False
    large = batch(400_000)
    group.submit(large)
    with pytest.raises(RankLostError, match="rank 1 has been silent"):
        group.forward(batch())


def test_error_of_rank_fails_call() -> None:
    group = started()

    def fail(name: str, *arguments: Any) -> None:
        kind = "model" if name == "load" else "RuntimeError"
        group.fakes[1].send("failed", 0, kind, "no head\nfits")

    group.fakes[1].answer = fail
    with pytest.raises(ModelError, match="rank 1: no head"):
        group.call("load")
    group.close()
    group = started()
    group.fakes[0].answer = lambda *call: None
    group.fakes[1].answer = fail
    with pytest.raises(RankLostError, match="rank 1 failed: RuntimeError: no head"):
        group.forward(batch())
    group.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 8, encode(("done", 999, None)), encode(7), b"GET / HTTP/1.1\r\n\r\n"])
def test_rank_with_malformed_message_is_lost(group: Group, garbage: bytes) -> None:
    group.fakes[1]._sock.sendall(garbage)
    end = time.monotonic() + 60
    while group.failure() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(RankLostError):
        group.call("load")


def test_only_missing_ranks_are_admitted() -> None:
    port = free_port()
    group = Group()
    group.topology = Topology(2, 2, 0, f"tcp://127.0.0.1:{port}")
    starting = threading.Thread(target=group.start)
    starting.start()
    for hello in (b"GET / HTTP/1.1\r\n\r\n", encode(("hello", 1, 1, bytes(32))), encode(5), b""):
        with connect(port) as stranger:
            stranger.sendall(hello)
            if hello:
                assert stranger.makefile("rb").read()[4:].startswith(b"\x92\xa9challenge")
    for rank in (0, 2):
        with connect(port) as stranger, pytest.raises(EOFError):
            knock(stranger, rank, "")
    sock = connect(port)
    knock(sock, 1, "")
    sock.settimeout(None)
    group.fakes.append(FakeRank(1, sock))
    starting.join(60)
    assert group.call("load") == {0: (0, "load"), 1: (1, "load")}
    group.close()


def test_second_process_replaces_a_rank_that_waits_for_others() -> None:
    """Former fault: a rank that ended while the engine waited for a third machine was refused when it came again."""
    port = free_port()
    group = Group()
    group.topology = Topology(3, 3, 0, f"tcp://127.0.0.1:{port}")
    starting = threading.Thread(target=group.start)
    starting.start()
    with connect(port) as earlier:
        knock(earlier, 1, "")
        for rank in (1, 2):
            sock = connect(port)
            knock(sock, rank, "")
            sock.settimeout(None)
            group.fakes.append(FakeRank(rank, sock))
        assert not earlier.recv(1)
    starting.join(60)
    assert group.call("load") == {rank: (rank, "load") for rank in range(3)}
    group.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_heartbeats_start_with_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: hours of heartbeats filled the buffer of an engine that waited for another machine."""

    def end(_code: int) -> None:
        raise SystemExit

    monkeypatch.setattr(rank_process, "exit_now", end)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        link = Link(theirs, FrameReader())
        assert not [each for each in threading.enumerate() if each.name == "heartbeat"]
        ours.sendall(encode((1, "load")))
        calls = link.messages()
        assert next(calls) == (1, "load")
        assert next(receive(ours, FrameReader())) == ("beat",)
        (beats,) = [each for each in threading.enumerate() if each.name == "heartbeat"]
    beats.join(60)
    assert not beats.is_alive()


def connect(port: int) -> socket.socket:
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 60)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_occupied_dist_init_address_names_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = Group()
        group.topology = Topology(2, 2, 0, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"--dist-init: .* Address already in use"):
            group.start()
