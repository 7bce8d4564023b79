"""Cost models of the simulated runner: how long a step would take. Pure arithmetic, no clock.

`Roofline` computes how long a chip takes, bound by its arithmetic or its memory, whichever is slower, and how many
tokens of KV cache it holds. `FixedCost` is for tests. `worker.simulation.presets` has both by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from worker.engine.batch import ScheduledBatch

# Assumed: share of a chip's peak rates that large matrix products, long copies and transfers reach in good kernels.
FLOPS_SHARE: Final = 0.45
BANDWIDTH_SHARE: Final = 0.75
LINK_SHARE: Final = 0.70
# Assumed: kernels of one layer (norms, projections, rotation, cache write, attention, activation), and the gap after
# each on the device in a captured graph, seconds.
KERNELS_PER_LAYER: Final = 10
KERNEL_S: Final = 3e-6
# Assumed: time of one all-reduce before the first byte, seconds; two per layer.
ALL_REDUCE_S: Final = 10e-6
# Host work per step for which the device waits: copying in the batch, copying out the tokens; seconds.
HOST_S: Final = 200e-6
ACTIVATION_BYTES: Final = 2
KV_BYTES: Final = 2
# The pool of a fixed cost, tokens.
FIXED_KV_TOKENS: Final = 16 * 16_384


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step, in the numbers that its duration depends on.

    Attributes:
        tokens: rows of the matrix products; a decode is one.
        sampled: rows whose logits are computed: a sequence's last row, and the rows of its drafts.
        context_tokens: KV cache entries read, summed over the sequences.
        pairs: (query, key) pairs of the causal attention, summed over the sequences.
    """

    tokens: int
    sampled: int
    context_tokens: int
    pairs: int

    @classmethod
    def of(cls, batch: ScheduledBatch) -> StepWork:
        """The work of a scheduled batch."""
        rows = zip(batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True)
        num_drafts = sum(map(len, batch.scheduled_spec_decode_tokens.values()))
        return cls.of_rows(rows, sum(batch.is_final) + num_drafts)

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int]], sampled: int) -> StepWork:
        """The work of sequences given as (tokens computed before, tokens to compute)."""
        tokens = context = pairs = 0
        for computed, count in rows:
            tokens += count
            context += computed + count
            pairs += count * computed + count * (count + 1) // 2
        return cls(tokens, sampled, context, pairs)


class CostModel(Protocol):
    """Durations of steps, and the size of the KV cache."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token; 0 uses the checkpoint's."""
        ...

    def step_s(self, work: StepWork) -> float:
        """Duration of a step, seconds."""
        ...

    def kv_tokens(self, utilization: float) -> int:
        """Tokens that the KV cache holds with `utilization` of the memory, a fraction."""
        ...


@dataclass(frozen=True)
class FixedCost:
    """A duration per step and one per computed token, seconds."""

    per_step_s: float = 0.0
    per_token_s: float = 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Always 0: the checkpoint's own."""
        return 0

    def step_s(self, work: StepWork) -> float:
        """`per_step_s + per_token_s * tokens`."""
        return self.per_step_s + self.per_token_s * work.tokens

    def kv_tokens(self, utilization: float) -> int:
        """The same for every `utilization`."""
        return FIXED_KV_TOKENS


INSTANT: Final = FixedCost()


@dataclass(frozen=True)
class Chip:
    """One accelerator's public figures.

    Attributes:
        memory: HBM, bytes.
        bandwidth: of the HBM, bytes per second.
        bf16_flops, fp8_flops: dense matrix rate, FLOP per second.
        link: to all its neighbours together, in one direction, bytes per second.
    """

    memory: float
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    link: float


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped queries and a gated MLP, named as in config.json; norms are left out."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def layer_params(self) -> int:
        """Weights of all layers' matrix products: queries and output, keys and values, the MLP's three."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def params(self) -> int:
        return self.layer_params + self.head_params * (1 if self.tie_word_embeddings else 2)

    @property
    def kv_numbers(self) -> int:
        """Numbers per token in the KV cache."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class Roofline:
    """A model on `num_chips` equal chips, tensor parallel. KV cache and activations have 2 bytes per number.

    A step takes the sum of
    - the matrix products: the longer of reading all their weights, `bytes / (num_chips * bandwidth * 0.75)`, and of
      their arithmetic, `2 * weights * tokens / (num_chips * FLOP rate * 0.45)`; logits count for sampled rows only;
    - attention: the longer of reading the KV cache, `context_tokens * kv_bytes_per_token`, and of its arithmetic,
      `4 * layers * heads * head_dim * pairs`, by the same rates (bf16);
    - two all-reduces per layer: 10 us and `2 * (n - 1) / n * tokens * hidden_size * 2` bytes over the links;
    - fixed overhead: 10 kernels of 3 us per layer, and 200 us on the host.

    Left out: activations in memory, imbalance between chips, and what the scheduler itself takes, because that is real
    in a simulation.

    Attributes:
        shape: of the model.
        chip: of which there are `num_chips`.
        num_chips: ranks of the tensor parallelism.
        weight_bytes: per weight; 2 is bf16, 1 is fp8 with fp8 arithmetic.
    """

    shape: ModelShape
    chip: Chip
    num_chips: int = 1
    weight_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token, on all chips together."""
        return KV_BYTES * self.shape.kv_numbers

    def step_s(self, work: StepWork) -> float:
        """Duration of a step, seconds."""
        return self.linear_s(work) + self.attention_s(work) + self.all_reduce_s(work) + self.overhead_s

    def kv_tokens(self, utilization: float) -> int:
        """Tokens of KV cache that fit beside the weights."""
        left = utilization * self.num_chips * self.chip.memory - self.shape.params * self.weight_bytes
        return max(0, int(left / self.kv_bytes_per_token))

    def linear_s(self, work: StepWork) -> float:
        """Time of the matrix products."""
        shape = self.shape
        flops = 2 * (shape.layer_params * work.tokens + shape.head_params * work.sampled)
        weights = shape.layer_params + (shape.head_params if work.sampled else 0)
        rate = self.chip.fp8_flops if self.weight_bytes == 1 else self.chip.bf16_flops
        return max(self._read_s(weights * self.weight_bytes), self._compute_s(flops, rate))

    def attention_s(self, work: StepWork) -> float:
        """Time of attention over the KV cache."""
        shape = self.shape
        flops = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * work.pairs
        kv_bytes = work.context_tokens * self.kv_bytes_per_token
        return max(self._read_s(kv_bytes), self._compute_s(flops, self.chip.bf16_flops))

    def all_reduce_s(self, work: StepWork) -> float:
        """Time of the sums over the chips."""
        n = self.num_chips
        if n == 1:
            return 0.0
        sent = 2 * (n - 1) / n * work.tokens * self.shape.hidden_size * ACTIVATION_BYTES
        return 2 * self.shape.num_hidden_layers * (ALL_REDUCE_S + sent / (self.chip.link * LINK_SHARE))

    @property
    def overhead_s(self) -> float:
        """Time of a step that does not depend on its work."""
        return HOST_S + self.shape.num_hidden_layers * KERNELS_PER_LAYER * KERNEL_S

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.num_chips * self.chip.bandwidth * BANDWIDTH_SHARE)

    def _compute_s(self, flops: float, rate: float) -> float:
        return flops / (self.num_chips * rate * FLOPS_SHARE)
