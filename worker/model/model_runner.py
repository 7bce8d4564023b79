"""Executes scheduled batches on a model: prepare_model, run_model, postprocess.

One rank, in process. A sequence's step is rows [num_computed_tokens, context_len) whatever it is called: prefill,
chunk, decode or re-prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.config import Config
from kernels.interface import AttentionMetaData, KernelBackend, KVCache, KVSpec
from kernels.select import CPU_BACKENDS, select_backend
from kernels.upload import to_device
from worker.config.architectures import support_model_arch_dict
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.grammars import Grammars, model_grammars
from worker.model.architectures import model_class
from worker.model.block_bytes import BlockBytes, BlocksDown
from worker.model.block_tables import BlockTables
from worker.model.decode_graphs import DecodeGraphs, capture_sizes
from worker.model.dtypes import resolve_dtype, resolve_kv_dtype, resolve_packed_format, warn_of_kv_scales
from worker.model.forward_context import (
    Context,
    DPMetadata,
    KVCacheTensor,
    forward_context,
)
from worker.model.kv_digests import KvDigester
from worker.model.model_loader import ModelLoader
from worker.model.pooling import mean_rows
from worker.model.sampled_rows import SampledRows
from worker.model.sampler import SampledTokens, Sampler
from worker.model.sharding import Shard, length
from worker.model.speculation.draft_loading import DraftSource
from worker.model.speculation.draft_proposer import DraftProposer, LaunchedStep, SampledStep
from worker.model.speculation.rejection_sampler import RejectionSampler
from worker.model.step_metadata import step_metadata
from worker.weights.checkpoint import LoadProgress, no_progress

__all__ = ["ModelInput", "ModelRunner", "support_model_arch_dict"]

# Angles of positions are float32.
_MAX_POSITIONS = 1 << 24

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModelInput:
    """One step as tensors; T is the number of tokens rounded up to the back end's row multiple.

    Attributes:
        token_ids: int64 [T], 0 for padding rows.
        context: positions and counts.
        metadata: what attention needs, with its plan.
        sampled: the rows whose logits are sampled.
        final_rows: int64 [R], these on the device.
        target_rows: int64 [G], rows whose logits say how likely `ScheduledBatch.targets` are, in their order.
        is_captured: whether a captured step runs it, which has a plan of its own; all rows are sampled.
    """

    token_ids: torch.Tensor
    context: Context
    metadata: AttentionMetaData
    sampled: SampledRows
    final_rows: torch.Tensor
    target_rows: torch.Tensor
    is_captured: bool


@dataclass
class _Pool:
    """KV caches of the model and of its draft model, and what layers find of them in the forward context."""

    cache: KVCache = None
    data: dict[str, KVCacheTensor] = field(default_factory=dict)
    draft_cache: KVCache = None
    draft_data: dict[str, KVCacheTensor] = field(default_factory=dict)

    @property
    def caches(self) -> list[KVCache]:
        """The caches that there are."""
        return [cache for cache in (self.cache, self.draft_cache) if cache is not None]


class ModelRunner:
    """A loaded model and its KV cache; implements worker.engine.batch.Runner. Not for two threads at a time.

    Args:
        config: `model` is the checkpoint folder; `dtype`, `kv_cache_dtype`, `kernels`, `cpu_isa`, `batch_invariant`,
            `quantize`, `max_model_len`, `kv_cache_block_size`, `quant_config`, `enforce_eager`, `compilation_config`
            and, on CPUs, `weights_cache` count.
        model_config: from the same folder.
        progress: called with (bytes loaded, bytes in all) for each tensor.
        shard: the part of the model that this rank holds; all of it when None.

    Attributes:
        draft_proposer: the draft model; None without one.
        kv_spec: shape of one layer's KV cache on this rank.
        num_heads: query heads of this rank.
        sampled_ids: number of token ids that may be sampled, from 0 on.
        may_force: True if some rank returns forced tokens, where a grammar allows one text only.
        forces: True if this rank returns them.
        mapped_bytes: bytes of the weight files that this process maps and reads in every step.
        mapped_file: path of the packed weights that this process maps; empty without them.

    Raises:
        ModelError: the model cannot be served; one line.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        progress: LoadProgress = no_progress,
        shard: Shard | None = None,
    ) -> None:
        if config.speculative_config is not None and not model_config.generates:
            raise ModelError(f"speculative_config: {model_config.architecture} generates nothing; leave it out")
        self.config = config
        self.model_config = model_config
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        if self.max_model_len > _MAX_POSITIONS:
            raise ModelError(
                f"a length of {self.max_model_len} tokens is beyond {_MAX_POSITIONS}, where positions are not told "
                "apart: give --max-model-len, or correct max_position_embeddings in config.json"
            )
        self.kernels = _kernels(config)
        self.dtype = resolve_dtype(config.dtype, model_config, self.kernels)
        self.kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self.dtype)
        self.packed_format = resolve_packed_format(config.quantize, self.dtype, self.kernels)
        self.shard = shard or Shard()
        if self.shard.rank == 0:
            warn_of_kv_scales(Path(config.model), model_config.source, self.kv_dtype)
        if config.enable_expert_parallel and not model_config.has_experts:
            raise ModelError(
                f"enable_expert_parallel: {model_config.architecture} has no experts to spread; leave it out"
            )
        architecture = model_class(model_config.architecture)
        self.kv_spec = architecture.kv_spec(model_config, self.shard)
        self.num_heads = length(self.shard.part(model_config.num_attention_heads, "num_attention_heads"))
        make_loader = partial(
            ModelLoader,
            kernels=self.kernels,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            packed_format=self.packed_format,
            max_position=self.max_model_len,
            shard=self.shard,
        )
        drafts = DraftSource.of(config, model_config)
        self._loader = make_loader(config, model_config, **({} if drafts is None else drafts.wanted))
        self.model = self._loader.load(progress)
        self.mapped_bytes, self.mapped_file = self._loader.mapped_bytes, self._loader.mapped_file
        self.sampled_ids = _sampled_ids(config.model, model_config)
        self.grammars = _grammars(config, model_config)
        self.sampler = Sampler(self.kernels, config.eos_token_ids, fetches=self.shard.rank == 0, grammars=self.grammars)
        self.may_force = self.grammars is not None and self.kernels.batch_invariant
        self.forces = self.may_force and self.shard.rank == 0
        self._kv_digester = KvDigester(self.kernels, self.shard)
        self._block_bytes = BlockBytes(self.kernels)
        self._graphs: DecodeGraphs | None = None
        # One for steps of decodes alone, one for others, which may alternate.
        self._tables = {True: BlockTables(), False: BlockTables()}
        self._pool = _Pool()
        self._dummy_pool: _Pool | None = None
        self.draft_proposer: DraftProposer | None = None if drafts is None else drafts.load(self, make_loader)

    @property
    def _kv_cache(self) -> KVCache:
        return self._pool.cache

    @property
    def weights_digest(self) -> str:
        """Digest of the checkpoint (worker/weights/checkpoint.py)."""
        return self._loader.weights_digest

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on this rank: what all layers keep of its tokens."""
        values = self.model_config.num_hidden_layers * self.kv_spec.values_per_token
        return values * self.config.kv_cache_block_size * self.kv_dtype.itemsize + self.draft_block_bytes

    @property
    def draft_block_bytes(self) -> int:
        """Bytes of the draft model in one KV block on this rank, at its end; 0 without one."""
        draft = self.draft_proposer
        values = 0 if draft is None else draft.num_layers * draft.kv_spec.values_per_token
        return values * self.config.kv_cache_block_size * self.kv_dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Makes the KV pool; earlier content is lost, and so are captured steps."""
        self._graphs = None
        layers = self.model_config.num_hidden_layers
        cache = self._allocate(self.kv_spec, layers, num_blocks)
        self._pool = _Pool(cache, {f"layers.{layer}": KVCacheTensor(layer, cache) for layer in range(layers)})
        if (draft := self.draft_proposer) is not None:
            self._pool.draft_cache = self._allocate(draft.kv_spec, draft.num_layers, num_blocks)
            self._pool.draft_data = draft.kv_cache_data(self._pool.draft_cache)

    def _allocate(self, spec: KVSpec, layers: int, num_blocks: int) -> KVCache:
        return self.kernels.kv_cache.allocate(spec, layers, num_blocks, self.config.kv_cache_block_size, self.kv_dtype)

    def touch_kv_cache(self, progress: LoadProgress = no_progress) -> None:
        """Has the system give the KV pool's memory now, so that no request waits for it."""
        self.kernels.kv_cache.touch(self._kv_cache, progress)
        if self.draft_proposer is not None:
            self.kernels.kv_cache.touch(self._pool.draft_cache, no_progress)

    @contextmanager
    def scratch_kv_cache(self, num_blocks: int) -> Iterator[None]:
        """A KV pool of its own for as long as the block runs, so that probes leave no trace in the real one."""
        with self._on_pool(_Pool()):
            self.allocate_kv_cache(num_blocks)
            yield

    @contextmanager
    def _on_pool(self, pool: _Pool) -> Iterator[None]:
        kept = self._pool, self._graphs
        self._pool, self._graphs = pool, None
        try:
            yield
        finally:
            self._pool, self._graphs = kept

    @property
    def captures_graphs(self) -> bool:
        """True if decode steps are captured: engines in lockstep ask each other in every step, which no graph can."""
        return self.kernels.graphs is not None and not self.config.enforce_eager and self.shard.data is None

    @property
    def captured_seq_len(self) -> int:
        """Tokens of the longest sequence that captured steps have room for, in the KV pool that there is now."""
        num_blocks: int = self._kv_cache.num_blocks
        return min(self.max_model_len, num_blocks * self.config.kv_cache_block_size)

    def capture_graphs(self, progress: Callable[[int, int], None] = no_progress) -> None:
        """Captures decode steps over the KV pool, where the back end can and `enforce_eager` does not say otherwise.

        Args:
            progress: called with (steps captured, steps to capture).
        """
        if not self.captures_graphs:
            return
        graphs = self.kernels.graphs
        assert graphs is not None
        with self.shard.collectives.capturing():
            self._graphs = DecodeGraphs(
                graphs,
                self._kv_cache,
                self.num_heads,
                self.captured_seq_len,
                capture_sizes(self.config),
                self._decode,
                self.kernels.device,
                progress,
            )

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step; only sequences whose last token is reached get a token."""
        return self.launch(batch)()

    def launch(self, batch: ScheduledBatch) -> Callable[[], ScheduledBatchOutput]:
        """Begins one step, and ends it on a CPU; what is returned waits for its tokens, on any thread.

        The next step may be launched before: it takes its tokens from this one on the device.
        """
        if batch.is_dummy_run:
            self.dummy_run()
        if not batch.req_ids:
            return self._move_blocks(batch)
        step = self.prepare_model(batch)
        self.sampler.begin(batch, step.sampled)
        rows, digests, logprobs = step.sampled, None, None
        with torch.inference_mode():
            kv_digests = self._kv_digester.begin(self._kv_cache, batch.digested_blocks)
            blocks_down = self._block_bytes.move(self._pool.caches, batch)
            for cache in self._pool.caches:
                self.kernels.kv_cache.copy_blocks(cache, batch.block_copies)
            final, before_targets, hidden = self._states(step)
            pooled = self.sampler.pooled(batch, hidden[:, : self.model_config.hidden_size], self.model.classifier)
            given = self.sampler.given_logprobs(batch, lambda rows: self._logits(before_targets[rows]))
            if batch.only_pools:
                ids = self.sampler.no_ids(len(final))
            elif batch.is_greedy:
                # The tokens that sampling would find in the logits of greedy rows, which are not made.
                ids = self.model.greedy(final, self.sampled_ids)
            else:
                logits = self._logits(final)
                digests = self.sampler.digests(batch, rows, logits)
                ids, logprobs = self.sampler.draw(batch, rows, logits)
        last = self.sampler.keep(rows, ids, step.token_ids, digests, logprobs, given, kv_digests, pooled)
        if self.draft_proposer is not None and batch.feeds_draft_model:
            self._draft(self.draft_proposer, batch, step, last, hidden)
        self.sampler.end_complete(batch)
        forced = self.sampler.forced(batch) if self.forces else {}
        with_ends = self.sampler.later_ends(batch)
        return lambda: _completed(with_ends(last.output), forced, blocks_down)

    @torch.inference_mode()
    def _move_blocks(self, batch: ScheduledBatch) -> Callable[[], ScheduledBatchOutput]:
        """Moves blocks from and to KV tiers in a step without sequences."""
        blocks_down = self._block_bytes.move(self._pool.caches, batch)
        return lambda: _completed(ScheduledBatchOutput({}), {}, blocks_down)

    @torch.inference_mode()
    def _draft(
        self,
        proposer: DraftProposer,
        batch: ScheduledBatch,
        step: ModelInput,
        last: SampledTokens,
        hidden: torch.Tensor,
    ) -> None:
        """Runs the draft model after the step's tokens. Waits for the tokens if penalties or masks change drafts."""
        total = step.metadata.num_tokens
        token_ids, states, kv_cache_data = step.token_ids[:total], hidden[:total], self._pool.draft_data
        if self.sampler.waits_for_tokens and not _steers_drafts(batch):
            wrong = last.num_rejected if batch.scheduled_spec_decode_tokens else None
            launched = LaunchedStep(
                batch, step.sampled, step.metadata, token_ids, last.ids, wrong, states, kv_cache_data
            )
            self.sampler.keep_drafts(proposer.launch(launched))
            return
        late = step.metadata.num_rejected
        told = None if late is None else late.cpu().numpy()
        drawn = SampledStep(batch, last.output.token_ids, token_ids.cpu().numpy(), states, kv_cache_data, told)
        last.output.draft_token_ids = proposer.propose(drawn)

    def prepare_model(self, batch: ScheduledBatch) -> ModelInput:
        """Turns the batch's lists into tensors, once per step.

        Raises:
            ValueError: a block table does not cover its sequence.
        """
        lengths = np.array(batch.num_scheduled_tokens, np.int64)
        starts = np.array(batch.num_computed_tokens, np.int64)
        covering = self._tables[batch.is_plain_decode]
        metadata, positions, rows = step_metadata(
            starts, lengths, batch.tables, covering, self.config.kv_cache_block_size
        )
        ends, total = metadata.cu_seqlens_q[1:], metadata.num_tokens
        sampled = SampledRows.of(batch)
        final_rows = sampled.step_rows
        target_rows = _target_rows(batch, ends)
        more_rows = np.concatenate((target_rows, mean_rows(batch, ends))) if batch.pooled else target_rows
        metadata.wanted_rows = np.union1d(final_rows, more_rows) if len(more_rows) else final_rows
        metadata.num_rejected = self.sampler.num_rejected(batch) if batch.drafts_in_flight else None
        if self.draft_proposer is not None and self.draft_proposer.takes_states and batch.feeds_draft_model:
            metadata.wanted_rows = None
        captured = (
            self._graphs is not None and batch.is_decode and self._graphs.fits(len(lengths), batch.num_spec_step + 1)
        )
        if not captured:
            metadata.plan = self.kernels.attention.plan(metadata, self._kv_cache, self.num_heads)
        multiple = self.kernels.row_multiple
        padded = -(-total // multiple) * multiple
        given = np.zeros((2, padded), np.int64)
        given[0, :total], given[1, :total] = batch.known_token_ids, positions
        inputs = to_device(np.concatenate((given.ravel(), final_rows, target_rows)), self.kernels.device)
        token_ids = self.sampler.with_late_tokens(batch, inputs[:padded], ends - lengths)
        context = Context(inputs[padded : 2 * padded], batch.total_seqs_num_prefill, len(lengths), padded)
        if metadata.num_rejected is not None:
            sampled = sampled.moved(metadata.num_rejected, rows, context.positions[:total])
        wanted, count = inputs[2 * padded :], len(final_rows)
        return ModelInput(token_ids, context, metadata, sampled, wanted[:count], wanted[count:], captured)

    @torch.inference_mode()
    def run_model(self, step: ModelInput) -> torch.Tensor:
        """float32 logits [R, V] of the sampled rows; -inf for ids that the tokenizer does not have.

        Of a checkpoint that generates nothing they are the hidden states [R, H].
        """
        states = self._states(step)[0]
        return self._logits(states) if self.model_config.generates else states.float()

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(states)
        logits[:, self.sampled_ids :] = -torch.inf
        return logits

    def _states(self, step: ModelInput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [R, H] of the sampled rows, [G, H] of those before targets, [T, H] of all that are wanted."""
        if step.is_captured:
            assert self._graphs is not None
            hidden = self._graphs.run(step.token_ids, step.context.positions, step.metadata)
            own = hidden[:, : self.model_config.hidden_size]
            return own, own[:0], hidden
        hidden = self._hidden(step.token_ids, step.metadata, step.context)
        own = hidden[:, : self.model_config.hidden_size]
        return own.index_select(0, step.final_rows), own.index_select(0, step.target_rows), hidden

    def _hidden(self, token_ids: torch.Tensor, metadata: AttentionMetaData, context: Context) -> torch.Tensor:
        """Hidden states [T, H]."""
        dp_metadata = self._dp_metadata(context.graph_bs)
        with forward_context(metadata, self.config, context, self._pool.data, dp_metadata):
            return self.model.forward(token_ids, context.positions)

    @torch.inference_mode()
    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        """Hidden states [T, H] of a step without prompts."""
        rows = len(token_ids)
        return self._hidden(token_ids, metadata, Context(positions, 0, rows, rows))

    def _dp_metadata(self, num_rows: int) -> DPMetadata | None:
        data = self.shard.data
        return None if data is None else DPMetadata.make(DPMetadata.num_tokens_across_dp(num_rows, data))

    def dummy_run(self) -> None:
        """Computes a step on a made-up row in a separate KV pool, so that this engine takes part in the others'
        experts.

        The pool is kept: an idle engine makes such a step for each of the others'.
        """
        seq = Sequence([0], self.config.kv_cache_block_size)
        seq.block_table = [0]
        if self._dummy_pool is None:
            with self.scratch_kv_cache(1):
                self._dummy_pool = self._pool
        with self._on_pool(self._dummy_pool):
            self.run_model(self.prepare_model(ScheduledBatch({seq.id: seq}, [1], 1)))

    def postprocess(self, batch: ScheduledBatch, logits: torch.Tensor) -> ScheduledBatchOutput:
        """Samples the rows of `logits`, into which penalties and masks are written."""
        rows = SampledRows.of(batch)
        tokens = RejectionSampler().accept(rows.metadata, self.sampler.sample(batch, rows, logits).tolist())
        return ScheduledBatchOutput(dict(zip(rows.seq_ids, tokens, strict=True)))


def _kernels(config: Config) -> KernelBackend:
    try:
        kernels = select_backend(config.kernels, config.cpu_isa, config.batch_invariant, config.enable_expert_parallel)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if config.compilation_config.cudagraph_capture_sizes and kernels.graphs is None:
        raise ModelError(f"cudagraph_capture_sizes: kernels {kernels.name} capture no graphs; leave it empty")
    if kernels.name in CPU_BACKENDS:
        _refuse_gpu_settings(config, kernels.name)
    if config.speculative_config is not None and not kernels.batch_invariant:
        raise ModelError(
            f"speculative_config: kernels {kernels.name} that are tuned by the number of rows compute several rows of "
            "a sequence to other bits than one at a time, so drafts would change tokens; leave out either it or "
            "--no-batch-invariant"
        )
    return kernels


def _refuse_gpu_settings(config: Config, kernels: str) -> None:
    """Refuses settings that kernels of a CPU would ignore.

    Raises:
        ModelError: `config` has such a setting.
    """
    if not config.batch_invariant:
        raise ModelError(
            f"batch_invariant: kernels {kernels} never depend on the batch; leave out --no-batch-invariant"
        )
    if config.enforce_eager:
        raise ModelError(f"enforce_eager: kernels {kernels} capture no graphs; leave out --enforce-eager")
    if config.gpu_memory_utilization != Config.gpu_memory_utilization:
        raise ModelError(
            f"gpu_memory_utilization: kernels {kernels} use no GPU; leave out --gpu-memory-utilization, or say "
            "--kv-cache-memory"
        )


def _completed(
    output: ScheduledBatchOutput, forced: dict[int, tuple[int, list[int]]], blocks_down: BlocksDown | None
) -> ScheduledBatchOutput:
    if forced:
        output.forced_token_ids = forced
    if blocks_down is not None:
        output.blocks_down = blocks_down()
    return output


def _steers_drafts(batch: ScheduledBatch) -> bool:
    """True if penalties or masks change the drafts of a sequence."""
    return any(batch.req_ids[i] in batch.drafts_wanted for i in batch.histories)


def _target_rows(batch: ScheduledBatch, ends: Ints) -> Ints:
    """int64 [G]: rows before `batch.targets`, in their order; the sequences' rows end at `ends`."""
    runs = [
        np.arange(end - len(targets), end)
        for i, targets in batch.targets.items()
        for end in [int(ends[i]) - batch.is_final[i]]
    ]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def _grammars(config: Config, model_config: ModelConfig) -> Grammars | None:
    """Grammars over the model's tokens; None where sequences cannot have any."""
    if not config.can_constrain or not has_tokenizer(config.model):
        return None
    return model_grammars(model_tokenizer(config.model), model_config.vocab_size, config.eos_token_ids)


def _sampled_ids(folder: str, model_config: ModelConfig) -> int:
    """Ids below this may be sampled: embedding matrices are often padded beyond the tokenizer's vocabulary."""
    if not has_tokenizer(folder):
        return model_config.vocab_size
    return min(model_tokenizer(folder).vocab_size, model_config.vocab_size)
