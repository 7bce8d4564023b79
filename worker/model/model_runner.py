"""Executes scheduled batches on a model: prepare_model, run_model, postprocess.

One rank, in process. A sequence's step is rows [num_computed_tokens, context_len) whatever it is called: prefill,
chunk, decode or re-prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.config import Config, QuantizationConfig
from common.text.tokenizer import Tokenizer
from kernels.interface import AttentionMetaData, KVCache, SampleParams
from kernels.no_token import NO_TOKEN
from kernels.penalties import Penalties
from kernels.select import select_backend
from kernels.upload import to_device
from worker.config.architectures import CausalModel, model_class, support_model_arch_dict
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput, TokenHistory
from worker.engine.sequence import Sequence
from worker.model.block_tables import BlockTables
from worker.model.decode_graphs import DecodeGraphs, capture_sizes
from worker.model.dtypes import resolve_dtype, resolve_kv_dtype, resolve_packed_format
from worker.model.forward_context import (
    Context,
    DPMetadata,
    KVCacheTensor,
    reset_forward_context,
    set_forward_context,
    set_kv_cache_data,
)
from worker.model.layers.build import Build
from worker.model.logit_adjustments import SeenTokens, masked_ids
from worker.model.sharding import Shard, length
from worker.weights.checkpoint import Progress, Weights, load_weights, no_progress, weight_files, weights_digest
from worker.weights.weights_cache import Keeper, Key, Making, WeightsCache, sources_digest

__all__ = ["ModelInput", "ModelRunner", "support_model_arch_dict"]

_WARMUP_TOKENS = 33
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
        final_rows: int64 [F], rows whose logits are sampled, in batch order.
        is_captured: whether a captured step runs it, which has a plan of its own; all rows are final.
    """

    token_ids: torch.Tensor
    context: Context
    metadata: AttentionMetaData
    final_rows: torch.Tensor
    is_captured: bool


class SampledTokens:
    """The tokens of a step: on the device at once, on the host when they have come.

    Args:
        seq_ids: of the sequences that have one.
        ids: int64 [F], on the device.
        fetched: waits for them on the host.
    """

    def __init__(self, seq_ids: list[int], ids: torch.Tensor, fetched: Callable[[], list[int]]) -> None:
        self.ids = ids
        self.place = {seq_id: i for i, seq_id in enumerate(seq_ids)}
        self._fetched = fetched

    @cached_property
    def output(self) -> ScheduledBatchOutput:
        """Waits; may be asked for by two threads at once."""
        return ScheduledBatchOutput({seq: (token,) for seq, token in zip(self.place, self._fetched(), strict=True)})


class ModelRunner:
    """A loaded model and its KV cache; implements worker.engine.batch.Runner. Not for two threads at a time.

    Args:
        config: `model` is the checkpoint folder; `dtype`, `kv_cache_dtype`, `kernels`, `cpu_isa`, `batch_invariant`,
            `quantize`, `max_model_len`, `kv_cache_block_size`, `quant_config`, `enforce_eager`, `compilation_config`
            and, on CPUs, `weights_cache` count.
        model_config: from the same folder.
        progress: called with (bytes loaded, bytes in all) for each tensor.
        shard: the part of the model that this rank holds; all of it when None.

    Raises:
        ModelError: the model can not be served; one line.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        progress: Progress = no_progress,
        shard: Shard | None = None,
    ) -> None:
        if config.speculative_config is not None:
            raise ModelError("speculative_config: no draft model is built yet; leave it None")
        self.config = config
        self.model_config = model_config
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        if self.max_model_len > _MAX_POSITIONS:
            raise ModelError(
                f"a length of {self.max_model_len} tokens is beyond {_MAX_POSITIONS}, where positions are not told "
                "apart: give --max-model-len, or correct max_position_embeddings in config.json"
            )
        try:
            self.kernels = select_backend(
                config.kernels, config.cpu_isa, config.batch_invariant, config.enable_expert_parallel
            )
        except ValueError as error:
            raise ModelError(str(error)) from error
        if config.compilation_config.cudagraph_capture_sizes and self.kernels.graphs is None:
            raise ModelError(f"cudagraph_capture_sizes: kernels {self.kernels.name} capture no graphs; leave it empty")
        self.dtype = resolve_dtype(config.dtype, model_config, self.kernels)
        self.kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self.dtype)
        self.packed_format = resolve_packed_format(config.quantize, self.dtype, self.kernels)
        self.shard = shard or Shard()
        if config.enable_expert_parallel and not model_config.has_experts:
            raise ModelError(
                f"enable_expert_parallel: {model_config.architecture} has no experts to spread; leave it out"
            )
        architecture = model_class(model_config.architecture)
        self._kv_spec = architecture.kv_spec(model_config, self.shard)
        self._num_heads = length(self.shard.part(model_config.num_attention_heads, "num_attention_heads"))
        with torch.inference_mode():
            self.model = self._load(progress)
        # Ids below it may be sampled.
        self.sampled_ids = _sampled_ids(config.model, model_config)
        self._last = self._sampled([], self._no_ids())
        self._seen = SeenTokens()
        # Whether the last step's tokens may still be on their way to the host when the next step is launched.
        self.waits_for_tokens = self.kernels.device.type != "cpu"
        self._graphs: DecodeGraphs | None = None
        # Of steps of decodes alone, and of others, which may come in turns.
        self._tables = {True: BlockTables(), False: BlockTables()}
        self._kv_cache: KVCache = None
        self._kv_cache_data: dict[str, KVCacheTensor] = {}
        self._dummy_pool: tuple[KVCache, dict[str, KVCacheTensor]] | None = None

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the checkpoint (worker/weights/checkpoint.py)."""
        return weights_digest(self.config.model)

    def _load(self, progress: Progress) -> CausalModel:
        """The model, by way of the cache of packed weights if there is one."""

        def build(kept: Keeper) -> CausalModel:
            return self._build(kept, progress)

        if not self.config.weights_cache or self.kernels.device.type != "cpu":
            return build(Making())
        return WeightsCache(Path(self.config.weights_cache)).load(self._key(), build, progress, self.kernels.adopt)

    def _build(self, kept: Keeper, progress: Progress) -> CausalModel:
        architecture, config = model_class(self.model_config.architecture), self.model_config
        self.mapped_bytes = kept.mapped_bytes
        weights = Weights({}, progress)
        if kept.needs_weights:
            weights = load_weights(
                self.config.model,
                architecture.tensor_shapes(config),
                progress,
                kept=architecture.kept_tensors(config),
                quantization=_quantization(self.config, config),
            )
        model = architecture(
            Build(
                config,
                self.kernels,
                weights,
                self.dtype,
                self.max_model_len,
                self.shard,
                self.kv_dtype,
                self.packed_format,
                kept,
            )
        )
        weights.use.log()
        return model

    def _key(self) -> Key:
        shard, data = self.shard, self.shard.data
        engines = (0, 1) if data is None else (data.rank, data.size)
        return Key(
            weights=self.weights_digest,
            files=weight_files(self.config.model),
            architecture=self.model_config.architecture,
            dtype=str(self.dtype),
            layout=repr(self.kernels.layout),
            sources=sources_digest(),
            quantization=repr((_quantization(self.config, self.model_config), self.packed_format)),
            rank=repr((shard.rank, shard.size, shard.expert_parallel, *engines)),
        )

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on this rank: what all layers keep of its tokens."""
        values = self.model_config.num_hidden_layers * self._kv_spec.values_per_token
        return values * self.config.kv_cache_block_size * self.kv_dtype.itemsize

    def num_blocks_for(self, kv_bytes: int) -> int:
        """Number of KV blocks that fit into `kv_bytes`."""
        return kv_bytes // self.kv_block_bytes

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Makes the KV pool; earlier content is lost, and so are captured steps."""
        self._graphs = None
        layers = self.model_config.num_hidden_layers
        self._kv_cache = self.kernels.allocate_kv(
            self._kv_spec, layers, num_blocks, self.config.kv_cache_block_size, self.kv_dtype
        )
        self._kv_cache_data = {f"layers.{layer}": KVCacheTensor(layer, self._kv_cache) for layer in range(layers)}

    def touch_kv_cache(self, progress: Progress = no_progress) -> None:
        """Has the system give the KV pool's memory now, so that no request waits for it."""
        self.kernels.touch_kv(self._kv_cache, progress)

    @contextmanager
    def scratch_kv_cache(self, num_blocks: int) -> Iterator[None]:
        """A KV pool of its own for as long as the block runs, so that probes leave no trace in the real one."""
        with self._on_pool(None, {}):
            self.allocate_kv_cache(num_blocks)
            yield

    @contextmanager
    def _on_pool(self, kv_cache: KVCache, data: dict[str, KVCacheTensor]) -> Iterator[None]:
        kept = self._kv_cache, self._kv_cache_data, self._graphs
        self._kv_cache, self._kv_cache_data, self._graphs = kv_cache, data, None
        try:
            yield
        finally:
            self._kv_cache, self._kv_cache_data, self._graphs = kept

    def warmup(self) -> None:
        """Runs one prefill and one decode, so that the first request does not pay for first calls."""
        seq = Sequence([0] * min(_WARMUP_TOKENS, self.max_model_len), self.config.kv_cache_block_size)
        seq.block_table = list(range(seq.num_blocks))
        with self.scratch_kv_cache(seq.num_blocks):
            self.forward(ScheduledBatch({seq.id: seq}, [seq.num_tokens], seq.num_tokens))
            seq.num_computed_tokens = seq.num_tokens - 1
            self.forward(ScheduledBatch({seq.id: seq}, [1], 1))

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
                self._num_heads,
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
            return lambda: ScheduledBatchOutput({})
        step = self.prepare_model(batch)
        ids = self._greedy(step) if batch.is_greedy else self._sample(batch, self.run_model(step))
        last = self._last = self._sampled([batch.req_ids[i] for i in _final(batch).tolist()], ids)
        return lambda: last.output

    def _no_ids(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self.kernels.device)

    def _sampled(self, seq_ids: list[int], ids: torch.Tensor) -> SampledTokens:
        # Rank 0 answers; the others need them at most for penalties, and wait then.
        fetched = ids.tolist if self.shard.rank else self.kernels.fetch(ids)
        return SampledTokens(seq_ids, ids, fetched)

    def prepare_model(self, batch: ScheduledBatch) -> ModelInput:
        """Turns the batch's lists into tensors, once per step.

        Raises:
            ValueError: a block table does not cover its sequence.
        """
        lengths = np.array(batch.num_scheduled_tokens, np.int64)
        starts = np.array(batch.num_computed_tokens, np.int64)
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
        needed = -(-(starts + lengths) // self.config.kv_cache_block_size)
        tables = self._tables[batch.is_plain_decode].of_step(batch.tables, needed)
        blocks, offsets = np.divmod(positions, self.config.kv_cache_block_size)
        final_rows = ends[np.array(batch.is_final, np.bool_)] - 1
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), ends)),
            seq_lens=starts + lengths,
            block_tables=tables,
            slot_mapping=tables[rows, blocks] * self.config.kv_cache_block_size + offsets,
            wanted_rows=final_rows,
        )
        captured = self._graphs is not None and batch.is_plain_decode and self._graphs.fits(len(lengths))
        if not captured:
            metadata.plan = self.kernels.plan_attention(metadata, self._kv_cache, self._num_heads)
        multiple = self.kernels.row_multiple
        padded = -(-total // multiple) * multiple
        given = np.zeros((2, padded), np.int64)
        given[0, :total], given[1, :total] = batch.known_token_ids, positions
        inputs = to_device(np.concatenate((given.ravel(), final_rows)), self.kernels.device)
        token_ids = self._with_late_tokens(batch, inputs[:padded], ends - lengths)
        context = Context(inputs[padded : 2 * padded], batch.total_seqs_num_prefill, len(lengths), padded)
        return ModelInput(token_ids, context, metadata, inputs[2 * padded :], captured)

    def _with_late_tokens(self, batch: ScheduledBatch, token_ids: torch.Tensor, starts: Ints) -> torch.Tensor:
        """`token_ids` with those that the last step has sampled, which never leave the device for it.

        Args:
            batch: whose tokens they are.
            token_ids: int64 [T], written to.
            starts: int64 [S], each sequence's first row.
        """
        late = batch.late_rows
        if late:
            places = np.array([self._last.place[batch.req_ids[i]] for i in late], np.int64)
            rows, places_there = to_device(np.stack((starts[late], places)), self.kernels.device)
            # NO_TOKEN has no embedding: its sequence ends, and what this step computes of it is for nobody.
            token_ids.index_copy_(0, rows, self._last.ids.index_select(0, places_there).clamp(min=0))
        return token_ids

    @torch.inference_mode()
    def run_model(self, step: ModelInput) -> torch.Tensor:
        """float32 logits [F, V] of the final rows; -inf for ids that the tokenizer does not have."""
        logits = self.model.compute_logits(self._final_states(step))
        logits[:, self.sampled_ids :] = -torch.inf
        return logits

    @torch.inference_mode()
    def _greedy(self, step: ModelInput) -> torch.Tensor:
        """int64 [F]: the tokens that `postprocess` would find in the logits of greedy rows, which are not made."""
        return self.model.greedy(self._final_states(step), self.sampled_ids)

    def _final_states(self, step: ModelInput) -> torch.Tensor:
        """Hidden states [F, H] of the final rows."""
        if step.is_captured:
            assert self._graphs is not None
            return self._graphs.run(step.token_ids, step.context.positions, step.metadata)
        return self._hidden(step.token_ids, step.metadata, step.context).index_select(0, step.final_rows)

    def _hidden(self, token_ids: torch.Tensor, metadata: AttentionMetaData, context: Context) -> torch.Tensor:
        """Hidden states [T, H]."""
        set_kv_cache_data(self._kv_cache_data)
        set_forward_context(metadata, self.config, context, self._dp_metadata(context.graph_bs))
        try:
            return self.model.forward(token_ids, context.positions)
        finally:
            reset_forward_context()

    @torch.inference_mode()
    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        """Hidden states [T, H] of one row of each sequence."""
        rows = len(token_ids)
        return self._hidden(token_ids, metadata, Context(positions, 0, rows, rows))

    def _dp_metadata(self, num_rows: int) -> DPMetadata | None:
        data = self.shard.data
        return None if data is None else DPMetadata.make(DPMetadata.num_tokens_across_dp(num_rows, data))

    def dummy_run(self) -> None:
        """A step on a row that nobody asked for, in a KV pool of its own: this engine's part of the others' experts.

        The pool is kept: an idle engine makes such a step for each of the others'.
        """
        seq = Sequence([0], self.config.kv_cache_block_size)
        seq.block_table = [0]
        if self._dummy_pool is None:
            with self.scratch_kv_cache(1):
                self._dummy_pool = self._kv_cache, self._kv_cache_data
        with self._on_pool(*self._dummy_pool):
            self.run_model(self.prepare_model(ScheduledBatch({seq.id: seq}, [1], 1)))

    def postprocess(self, batch: ScheduledBatch, logits: torch.Tensor) -> ScheduledBatchOutput:
        """Samples the final rows. Penalties and masks are written into `logits`."""
        tokens = self._sample(batch, logits).tolist()
        return ScheduledBatchOutput(
            {batch.req_ids[i]: (token,) for i, token in zip(_final(batch).tolist(), tokens, strict=True)}
        )

    def _histories(self, batch: ScheduledBatch, final: Ints) -> tuple[dict[int, TokenHistory], dict[int, int]]:
        """Histories of the final rows that have any, and where the last step has the newest token of some of them.

        On a CPU that token is on the host already, and in the history; elsewhere nothing waits for it.
        """
        late = [i for i in batch.histories if batch.from_last_output[i]]
        known = batch.histories
        if late and not self.waits_for_tokens:
            known, late = batch.token_histories(self._last.output), []
        row_of = {i: row for row, i in enumerate(final.tolist()) if i in known}
        places = {row_of[i]: self._last.place[batch.req_ids[i]] for i in late}
        return {row: known[i] for i, row in row_of.items()}, places

    def _penalties(self, histories: dict[int, TokenHistory], late: dict[int, int]) -> Penalties | None:
        """Penalties of the final rows; None when there are none."""
        penalized = {row: history for row, history in histories.items() if history.params.penalized}
        newest = self._newest([late.get(row, -1) for row in penalized]) if late else None
        return self._seen.penalties(penalized, newest)

    def _newest(self, places: list[int]) -> torch.Tensor:
        """int64 [R], on the device: the last step's tokens at these places, NO_TOKEN where there is no place."""
        there = to_device(np.array(places, np.int64), self.kernels.device)
        return torch.where(there < 0, NO_TOKEN, self._last.ids.index_select(0, there.clamp(min=0)))

    @torch.inference_mode()
    def _sample(self, batch: ScheduledBatch, logits: torch.Tensor) -> torch.Tensor:
        """int64 [F]: the tokens of the final rows."""
        final = _final(batch)
        if not len(final):
            return self._no_ids()
        histories, late = self._histories(batch, final)
        params = SampleParams(
            temperature=np.array(batch.temperatures, np.float32)[final],
            top_k=np.array(batch.top_ks, np.int64)[final],
            top_p=np.array(batch.top_ps, np.float32)[final],
            min_p=np.array(batch.min_ps, np.float32)[final],
            masked=masked_ids(histories, late, self.config.eos_token_ids, logits.shape[1]),
            penalties=self._penalties(histories, late),
        )
        return self.kernels.sample(
            logits,
            params,
            seeds=np.array(batch.seeds, np.uint64)[final],
            positions=np.array(batch.context_lens, np.int64)[final],
            choices=np.array(batch.choices, np.int64)[final],
        )


def _final(batch: ScheduledBatch) -> Ints:
    """Places of the sequences whose last token is reached."""
    return np.flatnonzero(np.array(batch.is_final, np.bool_))


def _quantization(config: Config, model_config: ModelConfig) -> QuantizationConfig:
    given, own = config.quant_config, model_config.quant_config
    if QuantizationConfig() not in (given, own) and given != own:
        raise ModelError("quant_config differs from the checkpoint's own in config.json; leave it at its default")
    return own if given == QuantizationConfig() else given


def _sampled_ids(folder: str, model_config: ModelConfig) -> int:
    """Ids below this may be sampled: embedding matrices are often padded beyond the tokenizer's vocabulary."""
    if not (Path(folder) / "tokenizer.json").is_file():
        return model_config.vocab_size
    return min(Tokenizer.from_folder(folder).vocab_size, model_config.vocab_size)
