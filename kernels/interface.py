"""Interface of a kernel back end: the operations of a decoder, the KV cache, attention and sampling.

A back end owns the layout of packed weights and of the KV cache; callers pass both back unopened. Shapes: T rows of a
step (its tokens, then padding), S sequences, H hidden size, Hq query heads, Hkv key/value heads, D head size, I
intermediate size, V vocabulary size. "Model dtype" is the dtype of weights and activations.

Every operation computes each row alone: a row's bits depend neither on the other rows nor on its position among them
(docs/explanation/determinism.md). A back end that cannot promise it says so in `batch_invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.grouped_weight import GroupedWeight, JoinedWeight
from kernels.penalties import Penalties
from kernels.upload import slots_at

# The granularity of a weight's scales (QUANT_TYPES of the configuration): `per_token` is one for each row.
QuantType = Literal["per_token", "per_1x32", "per_1x128", "per_128x128", "per_group"]
PackedLinear = Any
PackedHeads = Any
PackedExperts = Any
KVCache = Any
AttentionPlan = Any
TokenSelection = Any


@dataclass(frozen=True)
class IndexSpec:
    """The indexer of sparse attention: which tokens a query attends to (DeepSeek-V3.2).

    Attributes:
        num_heads: Hi, index queries per token.
        head_dim: Di of index queries and of a token's one index key.
        topk: tokens that a query attends to, at most.
    """

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class KVSpec:
    """KV cache of one token in one layer.

    Attributes:
        num_kv_heads: Hkv of this rank; 1 with an indexer.
        head_dim: D of keys, and of values that are stored beside them.
        latent_value_dim: 0, or the width Dv of values that are not stored: they are the first Dv numbers of their key.
        index: the sparse-attention indexer, which stores a key of its own; None for full attention.
    """

    num_kv_heads: int
    head_dim: int
    latent_value_dim: int = 0
    index: IndexSpec | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers that a token takes in one layer."""
        stored = self.num_kv_heads * self.head_dim * (1 if self.latent_value_dim else 2)
        return stored + (0 if self.index is None else self.index.head_dim)


@dataclass
class AttentionMetaData:
    """Inputs of one step's attention.

    Query row i of sequence s has the absolute position `seq_lens[s] - (cu_seqlens_q[s+1] - cu_seqlens_q[s]) + i`.

    Attributes:
        cu_seqlens_q: int64 [S+1], first row of each sequence; the last entry is the number of tokens.
        seq_lens: int64 [S], keys visible to each sequence's last row, including this step's.
        block_tables: int64 [S, longest], block ids in order, perhaps part of wider rows; entries past a sequence's end
            are not read.
        slot_mapping: int64 [tokens], `block * block_size + offset` of each token.
        wanted_rows: int64 [W], ascending, rows whose hidden states are wanted: of each sequence none or its last ones;
            None for all rows.
        num_rejected: int64 [S] on the back end's device: number of each sequence's drafts in flight that were wrong,
            which the host does not know yet. The sequence is that many tokens shorter than the arrays say: `seq_lens`
            and slots assume that no draft is wrong, and plans correct them. None if the arrays are right.
        plan: the back end's own data for this step, made by `AttentionOps.plan`.
    """

    cu_seqlens_q: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    wanted_rows: npt.NDArray[np.int64] | None = None
    num_rejected: torch.Tensor | None = None
    plan: AttentionPlan = None

    @property
    def num_tokens(self) -> int:
        """Rows that are tokens, without padding."""
        return int(self.cu_seqlens_q[-1])

    @property
    def sequences(self) -> npt.NDArray[np.int64]:
        """int64 [tokens]: the sequence of each row."""
        return np.repeat(np.arange(len(self.seq_lens)), np.diff(self.cu_seqlens_q))

    def positions(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [tokens]: the position of each row, whose sequence `sequences` names."""
        return np.arange(self.num_tokens) + (self.seq_lens - self.cu_seqlens_q[1:])[sequences]

    def moved(self, block_size: int) -> AttentionMetaData:
        """The step with corrected arrays, for back ends on the host; itself if they are right."""
        if self.num_rejected is None:
            return self
        step = replace(self, seq_lens=self.seq_lens - self.num_rejected.numpy(), num_rejected=None)
        sequences = step.sequences
        step.slot_mapping = slots_at(step.positions(sequences), sequences, step.block_tables, block_size)
        return step


@dataclass(frozen=True)
class LogitStats:
    """Numbers from which the logprobs of R rows are computed (kernels/logprobs.py), on the host.

    Attributes:
        highest: float32 [R], each row's largest logit.
        masses: int64 [R], sums of the masses; 0 if the largest logit is not finite, which makes the other numbers
            meaningless.
        ranks: int64 [R], of the rows' tokens; 1 is the likeliest.
        own: float32 [R], logits of the rows' tokens.
        top_ids: int64 [R, N], the likeliest ids, best first.
        top: float32 [R, N], their logits.
        given: float32 [R, G], logits of the requested ids.
    """

    highest: npt.NDArray[np.float32]
    masses: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    own: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]
    given: npt.NDArray[np.float32]


@dataclass(frozen=True)
class MaskedIds:
    """Ids that some of S rows must not sample now.

    Attributes:
        rows: int64 [M].
        ids: int64 [M].
        after: int64 [M], the output token directly after which the id is masked; NO_TOKEN for any. None if all are.
        late: int64 [M] on the back end's device, the newest output token of the row, which the host does not know yet;
            None if `after` is None.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64] | None = None
    late: torch.Tensor | None = None


@dataclass(frozen=True)
class AllowedIds:
    """The only ids that some of S rows may sample; each id once in a row.

    Attributes:
        rows: int64 [M].
        ids: int64 [M].
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True)
class AllowedBits:
    """The only ids that some of S rows may sample, a bit for each.

    Attributes:
        rows: int64 [M], each once.
        bits: uint32 [M, W], 32 ids a word, the lowest in its lowest bit; 32 W is at least V.
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class BiasedIds:
    """Numbers that are added to some logits of S rows; each id once in a row.

    Attributes:
        rows: int64 [M].
        ids: int64 [M].
        biases: float32 [M].
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]


@dataclass(frozen=True)
class SampleParams:
    """Sampling parameters of S rows, as in the request: temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    Attributes:
        temperature: float32 [S].
        top_k: int64 [S].
        top_p: float32 [S].
        min_p: float32 [S].
        masked: None if no row has any.
        penalties: None if no row has any.
        biased: None if no row has any.
        allowed: None if all rows may sample all ids.
        confined: grammar masks; None if no row has one. Independent of `allowed`.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    masked: MaskedIds | None = None
    penalties: Penalties | None = None
    biased: BiasedIds | None = None
    allowed: AllowedIds | None = None
    confined: AllowedBits | None = None


@dataclass(frozen=True)
class Routing:
    """Routing of a row to its experts by their logits.

    Attributes:
        top_k: experts of a row.
        scoring: `softmax` over all experts, `sigmoid` of each, or `topk_softmax` over the chosen ones.
        renormalize: whether the weights of the chosen add up to 1; not for `topk_softmax`, whose do.
        num_groups: groups of neighbouring experts; 1 for none.
        top_groups: groups that experts are chosen from, by the sum of their `group_best` best.
        scale: of the weights, at last.
        group_best: 2, or 1.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's activation: gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit`, up within +-`limit`.

    Raises:
        ValueError: `limit` is not above 0; native kernels would not clamp at all.
    """

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if not self.limit > 0.0:
            raise ValueError(f"limit is {self.limit}; it must be above 0")


@dataclass(frozen=True)
class QuantizedFormat:
    """Storage format of a quantized weight.

    Attributes:
        numbers: dtype: int8, float8_e4m3fn or float8_e4m3fnuz; uint8 for MXFP4 and GroupedWeight.
        quant_type: `per_1x32` means MXFP4, `per_group` any GroupedWeight.
    """

    numbers: torch.dtype
    quant_type: QuantType


GROUPED: Final = QuantizedFormat(torch.uint8, "per_group")


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K] as a checkpoint stores it, or a part of one: each number's value is the number times its scale.

    Parts of K begin at a multiple of the numbers that share a scale, so the first scale is that of the first number.

    Attributes:
        numbers: [N, K] in int8 or either FP8; for MXFP4 uint8 [N, K / 2], the earlier number of a byte in its lower
            half.
        scales: float32 [N] for `per_token` (a scale of the whole tensor is repeated for each row), [N, K / 128] for
            `per_1x128`, [N / 128, K / 128] for `per_128x128`, rounded up; for MXFP4 (`per_1x32`) exponents of 2 with a
            bias of 127, uint8 [N, K / 32], 255 for NaN.
        quant_type: granularity of the scales.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    quant_type: QuantType

    @property
    def format(self) -> QuantizedFormat:
        """Format in which it is stored."""
        return QuantizedFormat(self.numbers.dtype, self.quant_type)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        rows, width = self.numbers.shape
        return rows, 2 * width if self.quant_type == "per_1x32" else width


AnyWeight = torch.Tensor | QuantizedWeight | GroupedWeight | JoinedWeight


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's feed-forward network, or a rank's I of its inner units, in any float dtype or as it is stored.

    Where weights are quantized, `gate_up` has one format in all experts of a mixture, and so has `down`.

    Attributes:
        gate_up: [2I, H], all gates, then all ups.
        down: [H, I].
        gate_up_bias: [2I] or None.
        down_bias: [H] or None.
    """

    gate_up: AnyWeight
    down: AnyWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedFormat:
    """Numbers of 8 or 4 bits of a packed weight, in place of the model's dtype.

    Attributes:
        dtype: int8, or the device's FP8; quint4x2 for codes of 4 bits (kernels/grouped_weight.py, nearest_codes).
        quantizes_rows: False: one scale for each row of the weight and each 128 numbers of K, and x keeps its dtype.
            True: one scale for each row of the weight, and x is converted to `dtype` too, with one scale for each of
            its rows.
    """

    dtype: torch.dtype
    quantizes_rows: bool = False


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer on one rank, packed: attention and a feed-forward network, each after a norm.

    Attributes:
        input_norm: [H], as all norms in the model dtype.
        qkv: queries, keys and values concatenated, H to (Hq + 2 Hkv) * D.
        head_norms: [D] of queries and [D] of keys, before the rotation; None without such norms.
        window: number of keys that a row sees, including its own; None for all before it.
        sinks: float32 [Hq], see `AttentionOps.apply`; None for none.
        out: Hq * D to H.
        post_norm: [H].
        gate_up: H to 2I; None if there is a `network`.
        down: I to H; None if there is a `network`.
        network: another feed-forward network than the gated one, such as a mixture of experts: [T, H] -> [T, H], the
            sum over all ranks. None for none.
    """

    input_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None
    sinks: torch.Tensor | None
    out: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    network: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Decoder:
    """All layers of a model whose attention has keys and values for each head.

    Attributes:
        layers: from the first to the last.
        norm: [H], after the last layer.
        eps: of all norms.
        num_heads: Hq of this rank.
        scale: of attention's scores.
        all_reduce: sums the outputs of `out` and `down`, [T, H], over all ranks; None for one rank.
        aux_layers: layers before which the residual stream is returned too, for draft models; the number of layers
            means after the last one.
        stream_norm: [H], of a model that drafts from another model's states x: the first layer's attention takes the
            normed embeddings and, beside them, x normed by this. None for other models.
        norms_first: True if the residual stream of such a model starts with the normed x.
    """

    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    eps: float
    num_heads: int
    scale: float
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    aux_layers: tuple[int, ...] = ()
    stream_norm: torch.Tensor | None = None
    norms_first: bool = False


class FusedDecoder(Protocol):
    """All layers of a model as one operation."""

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetaData,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers and the last norm, with the bits of the single operations: x [T, H] -> [T, (1 + n) H].

        The first H columns are the states after the last norm; rows that are not in `metadata.wanted_rows` are
        undefined. The other columns are the residual streams before the n `aux_layers`. cos and sin are those of
        `ElementwiseOps.rope`; layer i uses the cache's layer i. `embedded` [T, H] are the embeddings of a model with a
        `stream_norm`.
        """
        ...


@dataclass(frozen=True)
class DraftHead:
    """A draft head of one layer for a target of V ids, on one rank. For further drafts it uses its own states.

    Attributes:
        decoder: its layer, with a `stream_norm`; returns the residual stream after the layer too.
        combine: concatenated states of the target, to H.
        embedding: [V, H] in the model dtype, or packed in it.
        cos: float32 [P, 1, R/2], of `ElementwiseOps.rope` by position.
        sin: float32 [P, 1, R/2], likewise.
        head: H to the ids that it drafts.
        target_ids: int64, the target's id of each draft id; None if they are equal.
        vocab_size: V.
        limit: ids below it may be drafted.
    """

    decoder: Decoder
    combine: PackedLinear
    embedding: torch.Tensor | PackedLinear
    cos: torch.Tensor
    sin: torch.Tensor
    head: PackedLinear
    target_ids: torch.Tensor | None
    vocab_size: int
    limit: int


@dataclass(frozen=True)
class DraftStep:
    """A step of the target with S sequences, each with a run of accepted rows; D of the sequences want drafts.

    Attributes:
        begins: int64 [S], first row of each sequence in the step.
        starts: int64 [S], position of that row.
        counts: int64 [S], accepted rows of each sequence, at least one.
        next_tokens: int64 [S], the token after the last accepted row.
        token_ids: int64 [T], of all rows.
        states: [T, W]; the last columns are the head's input states.
        block_tables: int64 [S, longest]; they cover the rows, and all drafts except each sequence's last.
        asking: int64 [D], ascending, indices of the sequences whose states are wanted.
        wanted: int64 [D], drafts of each.
        params: of S rows, without changes of logits.
        seeds: uint64 [S].
        choices: int64 [S].
    """

    begins: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    next_tokens: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    states: torch.Tensor
    block_tables: npt.NDArray[np.int64]
    asking: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.int64]
    params: SampleParams
    seeds: npt.NDArray[np.uint64]
    choices: npt.NDArray[np.int64]


class FusedDrafts(Protocol):
    """A head's part of a step as one operation."""

    def run(self, step: DraftStep, cache: KVCache) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Computes the rows into the cache, and drafts, with the bits of the single operations and
        `SamplingOps.sample`.

        Returns:
            The head's states after the last row of each asking sequence, [D, 2H], and its drafts, int64 [D, most]:
                NO_TOKEN after the last one.
        """
        ...


class StepGraphs(Protocol):
    """Captures a step's kernels, so that they run again without the Python between them (CUDA and HIP graphs).

    A captured step runs over memory at fixed addresses: tensors and a plan whose numbers are overwritten. With a
    `batch_invariant` back end its rows have the bits of the same step kernel by kernel.
    """

    def plan(self, cache: KVCache, num_heads: int, num_seqs: int, most_rows: int, max_seq_len: int) -> AttentionPlan:
        """A plan for every step of up to `num_seqs` sequences that have up to `most_rows` rows each, and are up to
        `max_seq_len` tokens long."""
        ...

    def write(self, plan: AttentionPlan, metadata: AttentionMetaData, cache: KVCache) -> None:
        """Writes a step's numbers into such a plan of that cache; rows that are not the step's are padding."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs `run` and captures it. The returned function runs the kernels again and returns the same tensor, with
        new numbers."""
        ...


@dataclass(frozen=True)
class Ranks:
    """The processes that share a tensor-parallel model, each with a device.

    Attributes:
        rank: of this process, of `size`.
        size: processes.
        open_store: opens a TCPStore of `torch.distributed` for the back end alone; all of them call it at once.
        in_order: whether they are on one machine, rank i on its device i.
    """

    rank: int
    size: int
    open_store: Callable[[], Any]
    in_order: bool


class RankSums(Protocol):
    """A back end's own sums over ranks, in its own order. Every rank calls the same operations."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, with the same bits on every rank; safe in captured steps."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager during the capture of steps."""
        ...

    def synchronize(self) -> None:
        """Waits until this rank's device has computed all sums that were started."""
        ...

    def close(self) -> None:
        """Frees the resources of the sums; called by all ranks once their devices have finished all sums."""
        ...


class LinearOps(Protocol):
    """Products with weights."""

    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedLinear:
        """Brings a weight [N, K] and a bias [N] of any float dtype into the back end's layout, in `dtype`.

        `packed_format` comes from `KernelBackend.packed_format`; None keeps `dtype`, and a quantized weight as it is
        where `keeps_quantized` says so. The result may share the weight's memory, which must therefore stay unchanged.
        """
        ...

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] times the packed weight, plus its bias: [T, N] in the model dtype."""
        ...

    def has_rows(self, packed: PackedLinear) -> bool:
        """True if a packed weight holds floats, whose rows `rows` can read."""
        ...

    def rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [T] of a packed weight [N, K] that `has_rows`, in its dtype: [T, K].

        For embeddings that are heads too.
        """
        ...

    def argmax(self, x: torch.Tensor, packed: PackedLinear, limit: int) -> torch.Tensor:
        """Column of the largest number among the first `limit` in each row of `apply`, the first of equals: [T].

        NaN counts as the lowest; NO_TOKEN if the largest number is not finite.
        """
        ...

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        """Brings a matrix for each head, [Hq, N, K], into the back end's layout, in `dtype`."""
        ...

    def apply_heads(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        """Each head of x [T, Hq, K] times its own matrix: [T, Hq, N] in the model dtype."""
        ...


class ElementwiseOps(Protocol):
    """Norms, rotation and activation."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm over the last dimension, in float32, rounded to x's dtype before the weight."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to the model dtype first."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / standard deviation * weight + bias over the last dimension, in float32, in x's dtype."""
        ...

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates the first R of D dimensions of q [T, Hq, D] and k [T, Hkv, D], half-split pairs; the rest stays.

        cos and sin are float32 [T, 1, R/2] per row.
        """
        ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[:, :I]) * x[:, I:] for x [T, 2I]: [T, I]; silu is rounded to the model dtype before the product."""
        ...

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_and_mul`, with GELU in its tanh approximation."""
        ...

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap) of float32 x [T, N]."""
        ...


class ExpertOps(Protocol):
    """A mixture of experts."""

    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts by float32 logits [T, E]: ids int64 [T, k] and weights float32 [T, k].

        The best comes first, of equals the lower id. `correction_bias` float32 [E] is added to the scores to choose by,
        not to the weights.
        """
        ...

    def pack(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        """Brings a rank's experts, ids `first`, `first` + 1, ..., into the back end's layout, in `dtype`.

        `packed_format` as in `LinearOps.pack`. They are silu(gate) * up inside, or as `clamp` says. The result may
        share the weights' memory.
        """
        ...

    def apply(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        """Weighted sum over the k slots of x [T, H] through the chosen experts: [T, H] in the model dtype.

        Ids of experts that are not packed here belong to another rank and add nothing. Summed in float32, in slot
        order.
        """
        ...


class KVCacheOps(Protocol):
    """The memory of the KV cache."""

    def allocate(self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        """A zeroed KV cache of `num_blocks` blocks of `block_size` tokens.

        `dtype` may be narrower than the model's, also FP8 (E4M3): written numbers are rounded, those beyond its range
        to its largest number, and read back exactly.
        """
        ...

    def touch(self, cache: KVCache, progress: Callable[[int, int], None]) -> None:
        """Takes the memory of the cache's pages now, so that no step waits for it; a GPU's memory is taken already.

        Args:
            cache: keeps its contents.
            progress: called with (bytes done, bytes in all).
        """
        ...

    def contents(self, cache: KVCache, block_id: int) -> list[torch.Tensor]:
        """All that the layers keep of a block's tokens, in one order for every worker: views of the cache."""
        ...

    def copy_blocks(self, cache: KVCache, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks in order: for each pair of ids, the first block's contents into the second, in all layers.

        Bytes are copied, whatever the dtype; the next launched step reads the copies.
        """
        ...


class AttentionOps(Protocol):
    """Attention with keys and values for each head, and the plan of a step that latent attention has too."""

    def plan(self, metadata: AttentionMetaData, cache: KVCache, num_heads: int) -> AttentionPlan:
        """Derives, once per step, what writing and attention need in every layer, latent or not."""
        ...

    def write(self, cache: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData) -> None:
        """Stores the rows of k and v [T, Hkv, D] in the slots of `metadata`; padding rows are not stored."""
        ...

    def apply(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the cache, which already has this step's keys: [T, Hq, D].

        One path for every number of rows: a decode is a prefill of one row. Padding rows are returned as zeros. With a
        `window`, rows attend to the last `window` tokens, including their own. `sinks` [Hq] are scores that enter a
        head's softmax without a value. With a `softcap` above 0, scores become softcap * tanh(score / softcap).
        """
        ...


class LatentAttentionOps(Protocol):
    """Attention over a cache whose values are part of its keys (`KVSpec.latent_value_dim`), and its indexer."""

    def write(self, cache: KVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """Stores the rows of k [T, D] in the slots of `metadata`; padding rows are not stored."""
        ...

    def write_index(self, cache: KVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """Stores the index keys k [T, Di] in the slots of `metadata`; padding rows are not stored."""
        ...

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: KVCache, layer: int, metadata: AttentionMetaData
    ) -> TokenSelection | None:
        """The tokens that each row attends to, by index queries q [T, Hi, Di] and weights float32 [T, Hi].

        A row selects, among the tokens up to its own, `topk` with the highest scores, all when there are no more. The
        score of a token with index key k is the sum over heads h of weights[h] * relu(q[h] . k), in float32; of equal
        scores the earlier token wins. None means that every row attends to all.
        """
        ...

    def apply(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: TokenSelection | None,
    ) -> torch.Tensor:
        """Like `AttentionOps.apply`, over a latent cache: [T, Hq, Dv], Dv being `KVSpec.latent_value_dim`.

        With a `selection`, rows attend to its tokens only.
        """
        ...


class SamplingOps(Protocol):
    """Operations that turn logits into tokens on the host."""

    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        """Column of the largest of each row of logits [S, V], as `LinearOps.argmax` of a product: int64 [S]."""
        ...

    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        """Starts to copy int64 [S] to the host; the returned function waits for the numbers, not for later work of the
        device."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids int64 [S] from float32 logits [S, V], by the rules of docs/explanation/determinism.md.

        NO_TOKEN for a row whose largest logit, after the masks, is not finite. `positions[i]` is the number of tokens
        before the sampled one, less `num_rejected[i]` (int64 [S], on the device) if the host does not know it;
        `choices[i]` is the index of the answer. Penalties (kernels/penalties.py), then biases, then masks are written
        into `logits`.
        """
        ...

    def logit_stats(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, given: npt.NDArray[np.int64]
    ) -> Callable[[], LogitStats]:
        """Begins to compute the statistics of float32 logits [R, V] for logprobs. The result waits for them, but not
        for later work.

        Args:
            logits: float32 [R, V], on the device.
            tokens: int64 [R], whose ranks and logits are wanted, on the device; NO_TOKEN is read as id 0.
            top: number of likeliest ids wanted, at most V.
            given: int64 [R, G], further ids.
        """
        ...


class KernelBackend(Protocol):
    """A kernel back end: its groups of operations, and facts that hold for all of them.

    No operation writes to its inputs, except those called `write` to the cache, and `sample` to the logits. Layers take
    the groups that they need when they are constructed.

    Attributes:
        name: selects the back end.
        description: name for people; with the instruction set if all kernels share one, such as `cpu:avx2`.
        batch_invariant: True if a row's bits never depend on the batch.
        device: of weights, activations and the KV cache, and of every tensor passed in or returned.
        graphs: captures steps; None if capturing gains nothing.
        row_multiple: steps are best padded to a multiple of this; other numbers of rows work but are copied.
        layout: facts that the bits of packed objects depend on, besides weights, dtype and the sources of `kernels`.
            Packed objects of one layout may come from another process (`adopt`). They are dataclasses of this package,
            with fields of numbers, tensors and other such dataclasses.
        linear, elementwise, experts, kv_cache, attention, latent_attention, sampling: the groups.
    """

    name: str
    description: str
    batch_invariant: bool
    device: torch.device
    graphs: StepGraphs | None
    row_multiple: int
    layout: tuple[object, ...]
    linear: LinearOps
    elementwise: ElementwiseOps
    experts: ExpertOps
    kv_cache: KVCacheOps
    attention: AttentionOps
    latent_attention: LatentAttentionOps
    sampling: SamplingOps

    @property
    def numerics(self) -> tuple[object, ...]:
        """Facts that a row's bits depend on, besides the model: libraries, instruction set, threads if they matter.

        Known once a model has been built with the back end. Its text is part of the numerics class.
        """
        ...

    def join_ranks(self, ranks: Ranks) -> RankSums | None:
        """Sums over the ranks by the back end; None leaves them to the caller. Every rank must call it and gets the
        same kind."""
        ...

    def adopt(self, packed: Any) -> None:
        """Prepares for the use of an object that another process packed, as if this process had packed it."""
        ...

    def is_fast(self, dtype: torch.dtype) -> bool:
        """True if a model in `dtype` is no slower than in float32 here; if not, `--dtype auto` does not take it."""
        ...

    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        """Packed format of a model's weights in `dtype` for `name`, one of `QUANTIZE`.

        None where that cannot be. FP8 is E4M3, in the form that the device multiplies.
        """
        ...

    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        """True if products of a model in `dtype` multiply weights of that format as they are.

        If not, they are best given as floats: a quantized weight is dequantized when it is packed.
        """
        ...

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> FusedDecoder | None:
        """All layers as one operation, over KV caches of that dtype; None if the back end only has single ones."""
        ...

    def fuse_drafts(self, head: DraftHead, kv_dtype: torch.dtype) -> FusedDrafts | None:
        """A draft head's part of a step as one operation, over KV caches of that dtype; None if there is none."""
        return None
