"""Parts of Config with their valid values. `Config` also refuses values that this version cannot run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from common.limits import MAX_FINISHED_TOKENS, MAX_SPECULATIVE_TOKENS
from common.params.checks import require, require_one_of, require_types

PREFILL_FIRST: Final = "prefill_first"
MIXED: Final = "mixed"
SCHEDULING_POLICIES: Final = (PREFILL_FIRST, MIXED)
# Formats that weights are quantized to when they are loaded.
QUANTIZE_NO: Final = "no"
QUANTIZE: Final = (QUANTIZE_NO, "int8", "int4", "fp8", "w8a8_int8", "w8a8_fp8")
DTYPES: Final = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES: Final = ("bfloat16", "float16", "fp8")
# The granularity of the scales of quantized weights.
QUANT_TYPES: Final = ("no", "per_tensor", "per_token", "per_1x16", "per_1x32", "per_1x64", "per_1x128", "per_128x128")
# The last two are codes with zero points, in words of 32 bits.
QUANT_DTYPES: Final = ("float32", "bfloat16", "float16", "fp8", "int8", "fp4x2", "int4x2", "int8x4")
# Begins names of layers that are regular expressions.
REGEX: Final = "re:"
# Ways to propose draft tokens: a lookup, and draft models.
NGRAM: Final = "ngram"
MTP: Final = "mtp"
EAGLE3: Final = "eagle3"
DRAFT_MODEL: Final = "draft_model"
SPECULATIVE_METHODS: Final = (NGRAM, MTP, EAGLE3, DRAFT_MODEL)
_WITH_MODEL: Final = (EAGLE3, DRAFT_MODEL)
# Formats that the loader reads: dtype of quantized weights -> granularities. `per_token` is one scale per weight row.
_CODE_TYPES: Final = ("per_token", "per_1x32", "per_1x64", "per_1x128")
WEIGHT_FORMATS: Final = {
    "fp8": ("per_tensor", "per_token", "per_1x128", "per_128x128"),
    "int8": ("per_tensor", "per_token", "per_1x128", "per_128x128"),
    "fp4x2": ("per_1x16", "per_1x32"),
    "int4x2": _CODE_TYPES,
    "int8x4": _CODE_TYPES,
}


@dataclass(frozen=True)
class ParallelConfig:
    """Data parallelism: the engines that share one model's requests, each with a copy of the dense layers.

    Attributes:
        data_parallel_size: engines in lockstep, whose ranks share the experts of a mixture.
        data_parallel_rank: of this engine.

    Raises:
        InvalidFieldError: a value is out of range.
    """

    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        require_types(self, "parallel_config.")
        size, rank = self.data_parallel_size, self.data_parallel_rank
        require(size >= 1, "parallel_config.data_parallel_size", size, "at least 1")
        require(0 <= rank < size, "parallel_config.data_parallel_rank", rank, f"0 to {size - 1}")


@dataclass(frozen=True)
class CompilationConfig:
    """Compilation and capture of the forward pass.

    Attributes:
        level: 0 runs it as it is; 1 to 3 are PyTorch's compiler as is, once, and piecewise.
        cudagraph_capture_sizes: numbers of sequences whose decode step is captured into a graph on a GPU; empty takes
            1, 2, 4, 8, 16, 24, ... up to 512 or the most that run at once (`Config.enforce_eager` captures none).

    Raises:
        InvalidFieldError: a value is out of range.
    """

    level: int = 0
    cudagraph_capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_types(self, "compilation_config.")
        require_one_of("compilation_config.level", self.level, (0, 1, 2, 3))
        sizes = self.cudagraph_capture_sizes
        require(
            all(size >= 1 for size in sizes), "compilation_config.cudagraph_capture_sizes", sizes, "sizes of at least 1"
        )


@dataclass(frozen=True)
class LayerQuantConfig:
    """Quantization of a layer's weights.

    Attributes:
        quant_type: granularity of the scales, one of QUANT_TYPES.
        quant_dtype: of the weights, one of QUANT_DTYPES.
        is_dynamic: whether the scales of activations are computed in the step.
        quant_method: name of the method that made the checkpoint.
        is_symmetric: True if every zero point is the middle code.
        has_order: True if columns were put into groups in another order than the model's.

    Raises:
        InvalidFieldError: a value is not known.
    """

    quant_type: str = "no"
    quant_dtype: str = "bfloat16"
    is_dynamic: bool = True
    quant_method: str = ""
    is_symmetric: bool = False
    has_order: bool = False

    def __post_init__(self) -> None:
        require_types(self, "quant_config.")
        require_one_of("quant_config.quant_type", self.quant_type, QUANT_TYPES)
        require_one_of("quant_config.quant_dtype", self.quant_dtype, QUANT_DTYPES)


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantization of the model's weights.

    A name fits a layer that is called so, lies below it or ends with it, whole components each; `*` matches any
    text, and a name that begins with `re:` is a regular expression of the beginning of a layer's name.

    Attributes:
        global_quant_config: of every layer that is not named below.
        layer_quant_configs: (name, its layers' quantization); the first that fits counts.
        exclude_layers: names of layers that are not quantized, whatever the other attributes say.

    Raises:
        InvalidFieldError: a value is of another type, or a name is no regular expression.
    """

    global_quant_config: LayerQuantConfig = field(default_factory=LayerQuantConfig)
    layer_quant_configs: tuple[tuple[str, LayerQuantConfig], ...] = ()
    exclude_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_types(self, "quant_config.")
        for name in (*self.exclude_layers, *(name for name, _ in self.layer_quant_configs)):
            require(_is_pattern(name), "quant_config", name, "a regular expression after `re:`")

    @property
    def layer_configs(self) -> tuple[LayerQuantConfig, ...]:
        """The quantization of every group of layers."""
        return (self.global_quant_config, *(config for _, config in self.layer_quant_configs))

    def of_layer(self, layer: str) -> LayerQuantConfig:
        """The quantization of a layer, such as `model.layers.0.mlp.up_proj`."""
        if any(_fits(name, layer) for name in self.exclude_layers):
            return LayerQuantConfig()
        named = (config for name, config in self.layer_quant_configs if _fits(name, layer))
        return next(named, self.global_quant_config)


def weight_formats() -> str:
    """The quantized weights that can be loaded, in words."""
    return "; ".join(f"{dtype} {', '.join(types)}" for dtype, types in WEIGHT_FORMATS.items())


def _fits(name: str, layer: str) -> bool:
    if name.startswith(REGEX):
        return re.match(name.removeprefix(REGEX), layer) is not None
    text = ".*".join(map(re.escape, name.split("*")))
    return re.fullmatch(rf"(?:.*\.)?{text}(?:\..*)?", layer) is not None


def _is_pattern(name: str) -> bool:
    try:
        re.compile(name.removeprefix(REGEX) if name.startswith(REGEX) else "")
    except (re.error, OverflowError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: who proposes draft tokens, and how many are verified per step.

    Attributes:
        num_speculative_tokens: most drafts of a sequence and step.
        method: `ngram` looks up what followed a sequence's newest tokens before; the others are draft models: `mtp` a
            layer of the checkpoint, `eagle3` a head of its own folder, `draft_model` a smaller model.
        model: that folder, or its name on the Hugging Face Hub; empty for the others.
        prompt_lookup_max: newest tokens that are looked up at most, by `ngram`.
        prompt_lookup_min: at least.
        prompt_lookup_finished: tokens of finished answers that `ngram` keeps, 4 bytes each, to look through those to
            prompts of the same cache salt that begin alike; 0 for none.
        adaptive: verifies as many drafts as pay, by what steps take and how many drafts are right; else all there are.

    Raises:
        InvalidFieldError: a value is out of range.
    """

    num_speculative_tokens: int = 1
    method: str = MTP
    model: str = ""
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_finished: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        name = "speculative_config."
        require_types(self, name)
        require_one_of(f"{name}method", self.method, SPECULATIVE_METHODS)
        needs_model = self.method in _WITH_MODEL
        valid = "a folder, or a name on the Hub" if needs_model else f"empty with method {self.method}"
        require(bool(self.model) == needs_model, f"{name}model", self.model, valid)
        count, longest, shortest = self.num_speculative_tokens, self.prompt_lookup_max, self.prompt_lookup_min
        most = MAX_SPECULATIVE_TOKENS
        require(1 <= count <= most, f"{name}num_speculative_tokens", count, f"1 to {most}")
        require(1 <= longest <= most, f"{name}prompt_lookup_max", longest, f"1 to {most}")
        valid = f"1 to prompt_lookup_max, {longest}"
        require(1 <= shortest <= longest, f"{name}prompt_lookup_min", shortest, valid)
        kept = self.prompt_lookup_finished
        valid = f"0 to {MAX_FINISHED_TOKENS}" if self.method == NGRAM else f"0 with method {self.method}"
        is_valid = 0 <= kept <= (MAX_FINISHED_TOKENS if self.method == NGRAM else 0)
        require(is_valid, f"{name}prompt_lookup_finished", kept, valid)
