"""The numerics class: two workers of one class give a request the same tokens (docs/explanation/determinism.md)."""

from __future__ import annotations

import hashlib

from common.params.sampling_params import SamplingParams
from worker.config.model_config import ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.decode_graphs import capture_sizes
from worker.model.model_runner import ModelRunner

_PREFILL = 300
_CHUNKS = (37, 20)
_DECODES = 40
_SEED = 0x5EED
_FEW_IDS = 7
# Any fixed numbers do; these are the constants of Knuth's MMIX generator.
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


def numerics_digest(runner: ModelRunner) -> str:
    """64-bit hex digest of the logit bits of a fixed probe, and of the facts that define a numerics class.

    The probe is a prefill, a prompt in two chunks and 40 sampled decodes of both together, in a KV pool of its own. The
    facts: architecture; dtypes of model, KV cache and packed weights; what the kernels' bits depend on; ranks; and
    `captured_facts`, which need the real pool. Ranks compute the digest together, and each gets the same one. For a
    checkpoint without an output head the hidden states are digested.

    Raises:
        ModelError: logits of the probe are NaN or infinite, so the model cannot be served.
    """
    digest = hashlib.blake2b(digest_size=8)
    facts = (
        runner.model_config.architecture,
        runner.dtype,
        runner.kv_dtype,
        runner.packed_format,
        runner.kernels.numerics,
        runner.shard.size,
        runner.shard.expert_parallel,
        1 if runner.shard.data is None else runner.shard.data.size,
        *captured_facts(runner),
    )
    digest.update(repr(facts).encode())
    decodes = min(_DECODES, (runner.max_model_len - 1) // 2)
    first = _probe_sequence(runner, min(_PREFILL, runner.max_model_len - decodes), decodes, 0)
    second = _probe_sequence(runner, min(sum(_CHUNKS), runner.max_model_len - decodes), decodes, len(first.block_table))
    with runner.scratch_kv_cache(len(first.block_table) + len(second.block_table)):
        _step(runner, digest, {first: first.num_tokens, second: min(_CHUNKS[0], second.num_tokens)})
        if not second.num_completion_tokens:
            _step(runner, digest, {second: second.num_tokens - second.num_computed_tokens})
        for _ in range(decodes - 1):
            _step(runner, digest, {first: 1, second: 1})
    return digest.hexdigest()


def captured_facts(runner: ModelRunner) -> tuple[int, ...]:
    """Graph-capture parameters that affect numerics: the longest sequence and the captured batch sizes.

    Call it while the runner has the KV pool that it captures over, which bounds the longest sequence. Empty with
    batch-invariant kernels: their tiles and splits follow from the model alone, so a captured step has the same bits as
    the same step kernel by kernel (tests/kernels/triton_backend/test_captured_tiles.py). Tuned kernels choose tiles by
    the size of the captured step.
    """
    if runner.kernels.batch_invariant or not runner.captures_graphs:
        return ()
    return (runner.captured_seq_len, *(size.num_rows for size in capture_sizes(runner.config)))


def _probe_sequence(runner: ModelRunner, length: int, decodes: int, first_block: int) -> Sequence:
    block_size = runner.config.kv_cache_block_size
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    state = length
    tokens = []
    for _ in range(length):
        state = (state * _MULTIPLIER + _INCREMENT) % 2**64
        tokens.append((state >> 33) % runner.model_config.vocab_size)
    seq = Sequence(tokens, block_size, params, seed=_SEED)
    seq.block_table = list(range(first_block, first_block - (-(length + decodes) // block_size)))
    return seq


def _step(runner: ModelRunner, digest: hashlib.blake2b, scheduled: dict[Sequence, int]) -> None:
    """Computes one step, adds its logits to the digest and its tokens to the sequences."""
    seqs = {seq.id: seq for seq in scheduled}
    batch = ScheduledBatch(seqs, list(scheduled.values()), sum(scheduled.values()))
    logits = runner.run_model(runner.prepare_model(batch))
    if not bool(logits[:, : runner.sampled_ids].isfinite().all()):
        raise ModelError(_no_numbers(runner))
    digest.update(logits.cpu().numpy().tobytes())
    tokens = runner.postprocess(batch, logits).token_ids if runner.model_config.generates else _any_tokens(batch)
    for seq, count in scheduled.items():
        seq.num_computed_tokens += count
        for token in tokens.get(seq.id, ()):
            seq.append_token(token)


def _no_numbers(runner: ModelRunner) -> str:
    """The error for NaN or infinite logits. Packed weights may be the cause, because they have no checksum."""
    problem = f"{runner.config.model} gives no numbers: its weights or its config.json make NaN or infinity"
    if not runner.mapped_file:
        return problem
    return f"{problem}, or the packed weights in {runner.mapped_file} are damaged: remove that file and start again"


def _any_tokens(batch: ScheduledBatch) -> dict[int, tuple[int, ...]]:
    """Arbitrary tokens for the final sequences of a model that generates none."""
    ends = zip(batch.req_ids, batch.context_lens, batch.is_final, strict=True)
    return {seq_id: (length % _FEW_IDS,) for seq_id, length, is_final in ends if is_final}
