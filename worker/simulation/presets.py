"""Cost models by name: what `--simulate` takes.

- `instant`: steps take no time.
- `fixed:5ms` (or `us`, `s`): every step takes so long.
- `CHIP-MODEL[-fp8][-tpN]`, for example `mi300x-llama-8b` or `mi355x-llama-70b-fp8-tp8`: the roofline of the chip, see
  `worker.simulation.cost_model`. Weights are bf16 without `fp8`, on one chip without `tpN` (N is 2, 4 or 8).

Chips, from AMD's data sheets (dense rates; a chip has 7 links to the 7 others of its board):

| chip | HBM | bandwidth | bf16 | fp8 | links, one direction |
| --- | --- | --- | --- | --- | --- |
| mi300x | 192 GB | 5.3 TB/s | 1307.4 TFLOP/s | 2614.9 TFLOP/s | 7 x 64 GB/s |
| mi355x | 288 GB | 8.0 TB/s | 2516.6 TFLOP/s | 5033.2 TFLOP/s | 7 x 76.8 GB/s |

Models, from their config.json (weights as computed from it, without norms; KV bytes per token in bf16):

| model | checkpoint | weights | KV bytes |
| --- | --- | --- | --- |
| qwen3-0.6b | Qwen3-0.6B | 0.60e9 | 114688 |
| qwen3-8b | Qwen3-8B | 8.19e9 | 147456 |
| qwen3-32b | Qwen3-32B | 32.76e9 | 262144 |
| llama-8b | Llama-3.1-8B | 8.03e9 | 131072 |
| llama-70b | Llama-3.1-70B | 70.55e9 | 327680 |

The arithmetic of `mi300x-llama-8b`, one sequence that decodes at 1000 tokens of context, us:
  weights read: (8.03e9 - 0.53e9 of the embedding) * 2 B / (5.3e12 B/s * 0.75)  = 3776
  their arithmetic: 2 * 7.50e9 / (1307.4e12 * 0.45) = 26, less, so it does not count
  KV read: 1000 * 131072 B / (5.3e12 * 0.75) = 33
  overhead: 200 + 32 layers * 10 kernels * 3 = 1160
  in all 4969 us: 201 tokens per second.
A prompt of 2048 tokens: arithmetic of the layers 2 * 6.98e9 * 2048 / (1307.4e12 * 0.45) = 48592, of one row of
logits 2, attention 4 * 32 * 32 * 128 * 2048 * 2049 / 2 / (1307.4e12 * 0.45) = 1870, overhead 1160: 51.6 ms, 39 700
tokens per second. KV cache at 90 %: (0.9 * 192e9 - 16.06e9) / 131072 = 1.20e6 tokens.
"""

from __future__ import annotations

import re
from typing import Final

from common.errors import InvalidFieldError
from worker.simulation.cost_model import INSTANT, Chip, CostModel, FixedCost, ModelShape, Roofline

CHIPS: Final = {
    "mi300x": Chip(memory=192e9, bandwidth=5.3e12, bf16_flops=1307.4e12, fp8_flops=2614.9e12, link=7 * 64e9),
    "mi355x": Chip(memory=288e9, bandwidth=8.0e12, bf16_flops=2516.6e12, fp8_flops=5033.2e12, link=7 * 76.8e9),
}
MODELS: Final = {
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, 151_936, tie_word_embeddings=True),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25_600, 151_936),
    "llama-8b": ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    "llama-70b": ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256),
}
GRAMMAR: Final = (
    f"instant, fixed:TIME such as fixed:5ms, or CHIP-MODEL[-fp8][-tpN] with CHIP one of {', '.join(CHIPS)}, "
    f"MODEL one of {', '.join(MODELS)} and N 2, 4 or 8"
)
_FIXED = re.compile(r"fixed:(\d+(?:\.\d+)?)(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_CHIP = re.compile(rf"({'|'.join(CHIPS)})-({'|'.join(map(re.escape, MODELS))})(-fp8)?(?:-tp([248]))?")


def cost_model(preset: str) -> CostModel:
    """The cost model of a preset's name.

    Raises:
        InvalidFieldError: there is no such preset, or its weights do not fit its memory.
    """
    if preset == "instant":
        return INSTANT
    if match := _FIXED.fullmatch(preset):
        return FixedCost(float(match[1]) * _UNITS[match[2]])
    if match := _CHIP.fullmatch(preset):
        return _roofline(preset, match[1], match[2], is_fp8=match[3] is not None, num_chips=int(match[4] or 1))
    raise InvalidFieldError("simulate", f"is {preset!r}", GRAMMAR)


def _roofline(preset: str, chip: str, model: str, *, is_fp8: bool, num_chips: int) -> Roofline:
    made = Roofline(MODELS[model], CHIPS[chip], num_chips, 1 if is_fp8 else 2)
    weights, memory = made.shape.params * made.weight_bytes, num_chips * made.chip.memory
    if weights >= memory:
        problem = f"is {preset!r}: {weights / 1e9:.0f} GB of weights in {memory / 1e9:.0f} GB of memory"
        raise InvalidFieldError("simulate", problem, "more chips (-tpN) or -fp8")
    return made
