"""The limits of a machine with a model: bytes over bandwidth, operations over its arithmetic rate. Pure.

The time of a step is at least that of reading every weight and the KV cache once, and at least that of its
multiply-adds. On a machine with much arithmetic the first is longer, with little the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine reaches with all threads.

    Attributes:
        read: bytes per second from memory.
        flops: operations per second, a multiply-add is two.
    """

    read: float
    flops: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder, whose head's weights are read once per step.

    Attributes:
        layers: of the decoder.
        layer_weights: numbers in the projections of all layers.
        head_weights: numbers in the output projection.
        heads_width: query heads times their dimension.
        kv_width: key and value heads times their dimension, keys and values together.
    """

    layers: int
    layer_weights: int
    head_weights: int
    heads_width: int
    kv_width: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Of the entries of a Qwen3 config.json."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads_width = config["num_attention_heads"] * config["head_dim"]
        kv_width = 2 * config["num_key_value_heads"] * config["head_dim"]
        attention = hidden * (heads_width + kv_width) + heads_width * hidden
        layer = attention + 3 * hidden * config["intermediate_size"]
        return cls(layers, layers * layer, hidden * config["vocab_size"], heads_width, kv_width)

    def decode_bytes(self, batch: int, context: int, weight_bytes: float, kv_bytes: float = 2.0) -> float:
        """Bytes of a decode step: all weights once, and the KV cache of `batch` sequences of `context` tokens."""
        weights = (self.layer_weights + self.head_weights) * weight_bytes
        return weights + batch * context * self.layers * self.kv_width * kv_bytes

    def decode_flops(self, batch: int, context: int) -> float:
        """Operations of a decode step."""
        attention = 4.0 * context * self.heads_width * self.layers
        return batch * (2.0 * (self.layer_weights + self.head_weights) + attention)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of computing a prompt, causal attention included; the head's one row is left out."""
        attention = 4.0 * tokens * tokens / 2 * self.heads_width * self.layers
        return 2.0 * self.layer_weights * tokens + attention


def decode_floor(
    shape: Shape, machine: Machine, batch: int, context: int, weight_bytes: float, kv_bytes: float = 2.0
) -> float:
    """Seconds that a decode step takes at least."""
    read = shape.decode_bytes(batch, context, weight_bytes, kv_bytes) / machine.read
    return max(read, shape.decode_flops(batch, context) / machine.flops)


def prefill_floor(shape: Shape, machine: Machine, tokens: int, weight_bytes: float) -> float:
    """Seconds that computing a prompt takes at least."""
    return max(shape.layer_weights * weight_bytes / machine.read, shape.prefill_flops(tokens) / machine.flops)


@dataclass(frozen=True, slots=True)
class Bound:
    """Output tokens per second that a closed loop can reach at best.

    Attributes:
        overlapped: the longer of all reads and all operations, which then hide each other fully. No machine beats it.
        in_series: prefills and decode steps after each other, each at its own floor.
    """

    overlapped: float
    in_series: float


def closed_loop_bound(
    shape: Shape, machine: Machine, concurrency: int, prompt: int, output: int, weight_bytes: float
) -> Bound:
    """Of requests of `prompt` and `output` tokens (their means), `concurrency` at a time, whose steps hold all of them.

    Prefills that run beside a decode step share its reading of the weights, so that the overlapped bound counts no
    bytes for them.
    """
    context = prompt + output // 2
    read = output * shape.decode_bytes(concurrency, context, weight_bytes) / machine.read
    decode = output * shape.decode_flops(concurrency, context) / machine.flops
    prefill = concurrency * shape.prefill_flops(prompt) / machine.flops
    series = concurrency * prefill_floor(shape, machine, prompt, weight_bytes)
    series += output * decode_floor(shape, machine, concurrency, context, weight_bytes)
    tokens = concurrency * output
    return Bound(tokens / max(read, decode + prefill), tokens / series)
