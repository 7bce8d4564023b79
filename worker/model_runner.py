"""Executes scheduled batches on a model (seed 003 section 3 step 7): prepare_model, run_model, postprocess.

One rank, in process. A sequence's step is rows [num_computed_tokens, context_len) whatever it is called: prefill,
chunk, decode or re-prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.config import Config, QuantizationConfig
from common.text.tokenizer import Tokenizer, TokenizerError
from kernels.interface import AttentionMetaData, KVCache, SampleParams
from kernels.select import select_backend
from worker.batch import ScheduledBatch, ScheduledBatchOutput
from worker.dtype import resolve_dtype, resolve_kv_dtype, resolve_packed_dtype
from worker.forward_context import (
    Context,
    DPMetadata,
    KVCacheTensor,
    reset_forward_context,
    set_forward_context,
    set_kv_cache_data,
)
from worker.layers.build import Build
from worker.loader import Progress, Weights, load_weights, no_progress, weight_files, weights_digest
from worker.model_config import ModelConfig, ModelError
from worker.models.registry import CausalModel, model_class, support_model_arch_dict
from worker.parallel import Shard, length
from worker.sequence import Sequence
from worker.steering import masked_ids, penalties
from worker.weights_cache import Keeper, Key, Making, WeightsCache, sources_digest

__all__ = ["ModelInput", "ModelRunner", "support_model_arch_dict"]

_WARMUP_TOKENS = 33

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModelInput:
    """One step as tensors; T is the number of tokens rounded up to the back end's row multiple.

    Attributes:
        token_ids: int64 [T], 0 for padding rows.
        context: positions and counts.
        metadata: what attention needs, with its plan.
        final_rows: int64 [F], rows whose logits are sampled, in batch order.
    """

    token_ids: torch.Tensor
    context: Context
    metadata: AttentionMetaData
    final_rows: torch.Tensor


class ModelRunner:
    """A loaded model and its KV cache; implements worker.batch.Runner. Not for two threads at a time.

    Args:
        config: `model` is the checkpoint folder; `dtype`, `kv_cache_dtype`, `kernels`, `cpu_isa`, `quantize`,
            `max_model_len`, `kv_cache_block_size`, `quant_config` and `weights_cache` count.
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
        try:
            self.kernels = select_backend(config.kernels, config.cpu_isa)
        except ValueError as error:
            raise ModelError(str(error)) from error
        self.dtype = resolve_dtype(config.dtype, model_config, self.kernels)
        self.kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self.dtype)
        self.packed_dtype = resolve_packed_dtype(config.quantize, self.dtype, self.kernels)
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
        self._sampled_ids = _sampled_ids(config.model, model_config)
        self._last_output = ScheduledBatchOutput({})
        self._kv_cache: KVCache = None
        self._kv_cache_data: dict[str, KVCacheTensor] = {}

    @cached_property
    def weights_digest(self) -> str:
        """Of the checkpoint (worker/loader.py)."""
        return weights_digest(self.config.model)

    def _load(self, progress: Progress) -> CausalModel:
        """The model, by way of the cache of packed weights if there is one."""

        def build(kept: Keeper) -> CausalModel:
            return self._build(kept, progress)

        if not self.config.weights_cache:
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
        return architecture(
            Build(
                config,
                self.kernels,
                weights,
                self.dtype,
                self.max_model_len,
                self.shard,
                self.kv_dtype,
                self.packed_dtype,
                kept,
            )
        )

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
            quantization=repr((_quantization(self.config, self.model_config), self.packed_dtype)),
            rank=repr((shard.rank, shard.size, shard.expert_parallel, *engines)),
        )

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on this rank: what all layers keep of its tokens."""
        values = self.model_config.num_hidden_layers * self._kv_spec.values_per_token
        return values * self.config.kv_cache_block_size * self.kv_dtype.itemsize

    def num_blocks_for(self, kv_bytes: int) -> int:
        """How many KV blocks fit into `kv_bytes`."""
        return kv_bytes // self.kv_block_bytes

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Makes the KV pool; earlier content is lost."""
        layers = self.model_config.num_hidden_layers
        self._kv_cache = self.kernels.allocate_kv(
            self._kv_spec, layers, num_blocks, self.config.kv_cache_block_size, self.kv_dtype
        )
        self._kv_cache_data = {f"layers.{layer}": KVCacheTensor(layer, self._kv_cache) for layer in range(layers)}

    @contextmanager
    def scratch_kv_cache(self, num_blocks: int) -> Iterator[None]:
        """A KV pool of its own for as long as the block runs, so that probes leave no trace in the real one."""
        kept = self._kv_cache, self._kv_cache_data
        self.allocate_kv_cache(num_blocks)
        try:
            yield
        finally:
            self._kv_cache, self._kv_cache_data = kept

    def warmup(self) -> None:
        """Runs one prefill and one decode, so that the first request does not pay for first calls."""
        seq = Sequence([0] * min(_WARMUP_TOKENS, self.max_model_len), self.config.kv_cache_block_size)
        seq.block_table = list(range(seq.num_blocks))
        with self.scratch_kv_cache(seq.num_blocks):
            self.forward(ScheduledBatch({seq.id: seq}, [seq.num_tokens], seq.num_tokens))
            seq.num_computed_tokens = seq.num_tokens - 1
            self.forward(ScheduledBatch({seq.id: seq}, [1], 1))

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step; only sequences whose last token is reached get a token (T31)."""
        if batch.is_dummy_run:
            self.dummy_run()
        if not batch.req_ids:
            return ScheduledBatchOutput({})
        step = self.prepare_model(batch)
        if batch.is_greedy:
            self._last_output = _output(batch, np.flatnonzero(batch.is_final), self._greedy(step))
        else:
            self._last_output = self.postprocess(batch, self.run_model(step))
        return self._last_output

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
        tables = _block_tables(batch.block_tables, -(-(starts + lengths) // self.config.kv_cache_block_size))
        blocks, offsets = np.divmod(positions, self.config.kv_cache_block_size)
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), ends)),
            seq_lens=starts + lengths,
            block_tables=tables,
            slot_mapping=tables[rows, blocks] * self.config.kv_cache_block_size + offsets,
        )
        metadata.plan = self.kernels.plan_attention(metadata, self._kv_cache, self._num_heads)
        multiple = self.kernels.row_multiple
        padded = -(-total // multiple) * multiple
        context = Context(_padded(positions, padded), batch.total_seqs_num_prefill, len(lengths), padded)
        token_ids = _padded(np.array(batch.input_token_ids(self._last_output), np.int64), padded)
        final_rows = torch.from_numpy(ends[np.array(batch.is_final, np.bool_)] - 1)
        return ModelInput(token_ids, context, metadata, final_rows)

    @torch.inference_mode()
    def run_model(self, step: ModelInput) -> torch.Tensor:
        """float32 logits [F, V] of the final rows; -inf for ids that the tokenizer does not have."""
        logits = self.model.compute_logits(self._final_states(step))
        logits[:, self._sampled_ids :] = -torch.inf
        return logits

    @torch.inference_mode()
    def _greedy(self, step: ModelInput) -> torch.Tensor:
        """int64 [F]: the tokens that `postprocess` would find in the logits of greedy rows, which are not made."""
        return self.model.greedy(self._final_states(step), self._sampled_ids)

    def _final_states(self, step: ModelInput) -> torch.Tensor:
        """Hidden states [F, H] of the final rows."""
        set_kv_cache_data(self._kv_cache_data)
        set_forward_context(step.metadata, self.config, step.context, self._dp_metadata(step.context.graph_bs))
        try:
            hidden = self.model.forward(step.token_ids, step.context.positions)
        finally:
            reset_forward_context()
        return hidden.index_select(0, step.final_rows)

    def _dp_metadata(self, num_rows: int) -> DPMetadata | None:
        data = self.shard.data
        return None if data is None else DPMetadata.make(DPMetadata.num_tokens_across_dp(num_rows, data))

    def dummy_run(self) -> None:
        """A step on a row that nobody asked for, in a KV pool of its own: this engine's part of the others' experts."""
        seq = Sequence([0], self.config.kv_cache_block_size)
        seq.block_table = [0]
        with self.scratch_kv_cache(1):
            self.run_model(self.prepare_model(ScheduledBatch({seq.id: seq}, [1], 1)))

    @torch.inference_mode()
    def postprocess(self, batch: ScheduledBatch, logits: torch.Tensor) -> ScheduledBatchOutput:
        """Samples the final rows. Penalties and masks are written into `logits`."""
        final = np.flatnonzero(np.array(batch.is_final, np.bool_))
        if not len(final):
            return ScheduledBatchOutput({})
        known = batch.token_histories(self._last_output)
        histories = {row: known[i] for row, i in enumerate(final.tolist()) if i in known}
        params = SampleParams(
            temperature=np.array(batch.temperatures, np.float32)[final],
            top_k=np.array(batch.top_ks, np.int64)[final],
            top_p=np.array(batch.top_ps, np.float32)[final],
            min_p=np.array(batch.min_ps, np.float32)[final],
            penalties=penalties(histories),
            masked=masked_ids(histories, self.config.eos_token_ids, logits.shape[1]),
        )
        ids = self.kernels.sample(
            logits,
            params,
            seeds=np.array(batch.seeds, np.uint64)[final],
            positions=np.array(batch.context_lens, np.int64)[final],
            choices=np.array(batch.choices, np.int64)[final],
        )
        return _output(batch, final, ids)


def _output(batch: ScheduledBatch, final: Ints, ids: torch.Tensor) -> ScheduledBatchOutput:
    """The tokens `ids` of the sequences at `final`."""
    return ScheduledBatchOutput(
        {batch.req_ids[i]: (token,) for i, token in zip(final.tolist(), ids.tolist(), strict=True)}
    )


def _quantization(config: Config, model_config: ModelConfig) -> QuantizationConfig:
    given, own = config.quant_config, model_config.quant_config
    if QuantizationConfig() not in (given, own) and given != own:
        raise ModelError("quant_config differs from the checkpoint's own in config.json; leave it at its default")
    return own if given == QuantizationConfig() else given


def _sampled_ids(folder: str, model_config: ModelConfig) -> int:
    """Ids below this may be sampled: embedding matrices are often padded beyond the tokenizer's vocabulary."""
    try:
        return min(Tokenizer.from_folder(folder).vocab_size, model_config.vocab_size)
    except TokenizerError:
        return model_config.vocab_size


def _flat(lists: Iterable[list[int]], count: int) -> Ints:
    return np.fromiter(chain.from_iterable(lists), np.int64, count)


def _padded(values: Ints, length: int) -> torch.Tensor:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _block_tables(tables: list[list[int]], needed: Ints) -> Ints:
    """[S, longest] with zeros past each table's end."""
    lengths = np.array([len(table) for table in tables], np.int64)
    if (lengths < needed).any():
        raise ValueError("a block table does not cover its sequence")
    padded = np.zeros((len(tables), int(lengths.max())), np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = _flat(tables, int(lengths.sum()))
    return padded
