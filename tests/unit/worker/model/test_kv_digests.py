"""Digests of KV blocks: of a block's content at publication, whatever the batch, the chunks and the pool."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from common.config import Config
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import salt_root
from common.wire.kv_digests import block_names
from kernels.interface import IndexSpec, KVSpec
from kernels.torch_backend.backend import TorchBackend
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.engine.turns import EngineTurns
from worker.model import kv_digests
from worker.model.kv_digests import KvDigester
from worker.model.model_runner import ModelRunner
from worker.model.sharding import Shard

SIZE, TOKENS = 16, 40
HASH_SEED = 2**63 + 5
Found = dict[bytes, int]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    config = Config(model=str(folder), dtype="float32", max_model_len=256, kernels="torch")
    return ModelRunner(config, ModelConfig.from_folder(folder))


def prompts(*lengths: int, common: int = 35) -> list[Sequence]:
    rnd = random.Random(3)
    beginning = [rnd.randrange(5, 200) for _ in range(common)]
    params = SamplingParams(temperature=0.9, max_tokens=TOKENS, ignore_eos=True)
    made = [beginning + [rnd.randrange(5, 200) for _ in range(length)] for length in lengths]
    return [salted(tokens, params, b"s" * (i % 2), seed=i) for i, tokens in enumerate(made)]


def salted(tokens: list[int], params: SamplingParams, salt: bytes, **options: Any) -> Sequence:
    root = salt_root(b"m", cache_salt=salt, seed=HASH_SEED)
    return Sequence(tokens, SIZE, params, hash_root=root, cache_salt=salt, **options)


def run(
    runner: ModelRunner, seqs: list[Sequence], on_digest: Callable[[bytes], object] = lambda _: None, **options: Any
) -> Found:
    """Runs an engine and returns its digests; digests of one name must be equal."""
    settings: dict[str, Any] = {
        "model": runner.config.model,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "num_kvcache_blocks": 64,
        "enable_prefix_caching": True,
        "kv_digests": 1.0,
        "hash_seed": HASH_SEED,
    }
    config = Config(**settings | options)
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    core = EngineCore(config, runner)
    core.enter(seqs, is_gated=False)
    turns, found = EngineTurns(core, lambda: 0.0), Found()
    while turns.has_work:
        for name, digest in turns.run([]).kv_digests:
            assert found.setdefault(name, digest) == digest
            on_digest(name)
    core.close()
    return found


def name_of(seq: Sequence, place: int) -> bytes:
    packed = b"".join(struct.pack("=I", token) for token in seq.token_ids[: (place + 1) * SIZE])
    head = b"fissile kv digest 2\n" + struct.pack("<IQ", SIZE, HASH_SEED)
    return hashlib.blake2b(head + packed, digest_size=16).digest()


def digest_of(*parts: bytes) -> int:
    """Digest by the definition's words; each part is a rank's."""
    sums = []
    for part in parts:
        words = np.frombuffer(part + bytes(-len(part) % 8), "<i8")
        with np.errstate(over="ignore"):
            mixed = words * np.int64(0xBF58476D1CE4E5B9 - 2**64)
            mixed = mixed ^ (mixed >> 29)
            sums.append(int((mixed * np.arange(1, 2 * len(words), 2)).sum()))
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}q", *sums))


def expected(runner: ModelRunner, seqs: list[Sequence]) -> Found:
    """Digests of what single prefills of prompt and answer write."""
    found = Found()
    for seq in seqs:
        again = Sequence(seq.token_ids, SIZE)
        runner.allocate_kv_cache(again.num_blocks)
        again.block_table = list(range(again.num_blocks))
        tokens = again.num_tokens
        runner.run_model(runner.prepare_model(ScheduledBatch({again.id: again}, [tokens], tokens)))
        for place in range(tokens // SIZE):
            content = runner._kv_cache.data[:, :, place].contiguous().numpy().tobytes()
            found[name_of(seq, place)] = digest_of(content)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "scheduling_policy": "mixed"},
        {"deferred_output": True},
        # Room for two of the four: the others wait, and take the blocks of sequences that have just ended.
        {"num_kvcache_blocks": 16},
        {"num_kvcache_blocks": 16, "deferred_output": True, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_kv_digest_covers_block_at_publication(runner: ModelRunner, options: dict[str, Any]) -> None:
    seqs = prompts(20, 33, 41, 90)
    found = run(runner, seqs, **options)
    wanted = expected(runner, seqs)
    # The last blocks of the last answer have no step after them.
    assert len(found) >= len(wanted) - 4
    assert found == {name: wanted[name] for name in found}


@pytest.mark.parametrize("is_deferred", [False, True])
def test_block_is_digested_before_next_step_writes(runner: ModelRunner, is_deferred: bool) -> None:
    """The last step of a sequence fills its last block, and the next one has no other blocks for the next sequence."""
    seqs = prompts(22, 22, 22)
    assert (len(seqs[0].token_ids) + TOKENS - 1) % SIZE == 0
    found = run(runner, seqs, num_kvcache_blocks=7, max_model_len=7 * SIZE, deferred_output=is_deferred)
    wanted = expected(runner, seqs)
    assert name_of(seqs[0], 5) in found
    assert found == {name: wanted[name] for name in found}


def test_all_workers_sample_same_blocks(runner: ModelRunner) -> None:
    """A larger share has the blocks of a smaller one too."""
    half, quarter = (run(runner, prompts(90, 90), kv_digests=share) for share in (0.5, 0.25))
    assert 0 < len(quarter) < len(half)
    assert quarter.items() <= half.items()
    tokens = prompts(160)[0].token_ids
    chosen = []
    for salt in (b"", b"other"):
        seq = salted(tokens, SamplingParams(max_tokens=3, ignore_eos=True), salt)
        names = [name_of(seq, place) for place in range(len(tokens) // SIZE)]
        found = run(runner, [seq], kv_digests=0.5)
        chosen.append({names.index(name): digest for name, digest in found.items()})
    assert chosen[0] == chosen[1]
    assert 0 < len(chosen[0]) < len(tokens) // SIZE


def test_block_names_cover_all_tokens_and_hash_seed() -> None:
    seq = prompts(0, 20)[1]
    named = list(block_names(array("I", seq.token_ids), SIZE, HASH_SEED))
    assert named == [name_of(seq, place) for place in range(seq.num_tokens // SIZE)]
    assert not set(named) & set(block_names(array("I", seq.token_ids), SIZE, 0))


def test_equal_tokens_have_equal_digest_under_every_salt(runner: ModelRunner) -> None:
    """Blocks are computed separately for each salt, so the audit compares the tenants' computations."""
    (tokens,) = (seq.token_ids for seq in prompts(70))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    seqs = [salted(tokens, params, salt) for salt in (b"", b"one tenant", b"another")]
    made: list[bytes] = []
    found = run(runner, seqs, on_digest=made.append)
    assert len(found) == len(tokens) // SIZE
    assert sorted(made) == sorted(3 * list(found))


@pytest.mark.parametrize("is_deferred", [False, True])
def test_failed_digests_do_not_fail_step(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, is_deferred: bool
) -> None:
    seqs, undisturbed = prompts(20, 33), prompts(20, 33)
    assert run(runner, undisturbed, deferred_output=is_deferred)
    warned = []
    monkeypatch.setattr(kv_digests._log, "warning", lambda event, **said: warned.append((event, said)))
    monkeypatch.setattr(runner, "_kv_digester", KvDigester(runner.kernels, runner.shard))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(runner.kernels.kv_cache, "contents", fail)
    assert run(runner, seqs, deferred_output=is_deferred) == {}
    assert [seq.completion_token_ids for seq in seqs] == [seq.completion_token_ids for seq in undisturbed]
    assert all(seq.num_completion_tokens == TOKENS for seq in seqs)
    # Once, not at every step.
    assert warned == [("KV blocks are not digested", {"rank": 0, "why": "MemoryError: no room"})]


def test_blocks_are_not_digested_by_default(runner: ModelRunner) -> None:
    assert run(runner, prompts(90), kv_digests=0.0) == {}
    assert run(runner, prompts(90), enable_prefix_caching=False) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_index", [False, True])
def test_digest_covers_every_bit_of_its_block_only(dtype: torch.dtype, has_index: bool) -> None:
    kernels = TorchBackend()
    spec = KVSpec(1, 12, 9, IndexSpec(1, 5, 2)) if has_index else KVSpec(2, 9)
    cache = kernels.kv_cache.allocate(spec, 3, 4, 1, dtype)
    tensors = [cache.data] if cache.index is None else [cache.data, cache.index.data]
    rnd = random.Random(1)
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))

    def digest() -> int:
        found = KvDigester(kernels, Shard()).begin(cache, {2: b"name"})
        assert found is not None
        ((_, made),) = found()
        return made

    assert digest() == digest_of(b"".join(t[:, :, 2].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))
    before = digest()
    for tensor in tensors:
        for block in range(4):
            raw = tensor[:, :, block].view(torch.uint8)
            for _ in range(20):
                place = tuple(rnd.randrange(size) for size in raw.shape)
                bit = 1 << rnd.randrange(8)
                raw[place] ^= bit
                assert (digest() != before) == (block == 2)
                raw[place] ^= bit
    assert digest() == before
