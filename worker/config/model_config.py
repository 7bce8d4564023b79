"""Configuration of a model from its checkpoint folder: config.json and generation_config.json, checked. No PyTorch
here."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from common.config import DTYPES, QuantizationConfig
from common.files import UnreadableFileError, read_json_file
from common.limits import MAX_ALL_EXPERTS, MAX_CONFIG_FILE_BYTES, MAX_MODEL_EXPERTS
from common.params.sampling_params import SamplingParams, model_defaults
from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head
from worker.config.architectures import (
    draft_head_arch_dict,
    model_type,
    parted,
    refused_arch_dict,
    support_model_arch_dict,
    text_part_arch_dict,
)
from worker.config.gguf_config import gguf_config, gguf_sampling
from worker.config.gguf_file import gguf_files, read_gguf
from worker.config.quantization import parse_quantization
from worker.config.stored_names import stored_names
from worker.config.transformers_config import is_of_other_model, read_settings

SUPPORTED_ARCHITECTURES = tuple(support_model_arch_dict)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

Entry = TypeVar("Entry", int, str)
_KINDS: dict[type, str] = {int: "whole numbers", str: "names"}
# Largest count or length: kernels take them in 32 bits.
_MOST = 2**31 - 1
_LARGEST = sys.float_info.max
# Entries of a multimodal model that hold for its text part.
_OF_WHOLE = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# Names that `transformers` gives DeepSeek-V3.2's layers, which need not be told from others.
INDEXED_ATTENTION = "indexed_attention"


class ModelError(Exception):
    """A checkpoint that cannot be served; the message is one line that says what is wrong and what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the wavelengths.
        type: `default`, `linear`, `llama3`, `yarn` (arXiv:2309.00071) or `longrope` (arXiv:2402.13753).
        factor: how far positions are stretched; 1 for `default`.
        low_freq_factor, high_freq_factor: `llama3` only.
        original_max_position_embeddings: `llama3`, `yarn` and `longrope`.
        attention_factor: what cosines and sines are multiplied by; 1 but for `yarn` and `longrope`.
        beta_fast, beta_slow: `yarn` only: rotations over the original length above which a wavelength is kept, and
            below which it is stretched in full.
        truncate: `yarn` only: whether the borders between the two are rounded to whole dimensions.
        mscale_all_dim: `yarn` only: what DeepSeek's attention scales its scores by; 0 is off.
        partial_rotary_factor: the part of a head, from its first dimension on, that is rotated.
        short_factors, long_factors: `longrope` only: how far each wavelength is stretched where sequences are at most
            as long as the original length, and where they may be longer.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    partial_rotary_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's dimensions that are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and its generation defaults.

    Attributes:
        dtype: the checkpoint's own dtype, one of DTYPES.
        eos_token_ids: end-of-sequence ids of generation_config.json, then further ones of config.json.
        sampling_defaults: what generation_config.json says for parameters that a request leaves out.
        quant_config: how the checkpoint's weights are quantized.
        head: what it makes of hidden states.
        num_labels: of a classifier; else 0.
        rope: the rotary embedding of all layers, or of those that `local_rope` is not for.
        local_rope: the rotary embedding of layers with a sliding window; None if it is `rope`.
        source: config.json with the defaults of its config class, for settings that only one architecture has.
        The others are named as in config.json.
    """

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    quant_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    head: Head = OUTPUT_HEAD
    num_labels: int = 0
    local_rope: RopeConfig | None = None
    source: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        architectures: Collection[str] = SUPPORTED_ARCHITECTURES,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Reads and checks a checkpoint's configuration.

        Args:
            path: the folder, or a GGUF file.
            architectures: that it may have.
            settings: `source` of the same checkpoint, read by another process; avoids the import of `transformers`.

        Raises:
            ModelError: the folder or a file is missing or malformed, or the model is not supported.
        """
        folder = Path(path)
        try:
            source, config = read_config(folder)
            generation = _read_json(folder / "generation_config.json")
        except OSError as error:
            raise ModelError(
                f"{folder} cannot be read: {error.strerror}; change the path or its permissions"
            ) from error
        try:
            given = gguf_sampling(config) if generation is None else generation
            parsed = _parse(config, given, architectures, settings)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from None
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{source} cannot be used: {what}") from error
        needs_head = parsed.generates and not parsed.tie_word_embeddings
        return replace(parsed, head=NO_HEAD) if needs_head and _is_decoder_alone(folder) else parsed

    @property
    def generates(self) -> bool:
        """True if it has an output head."""
        return self.head == OUTPUT_HEAD

    @property
    def has_experts(self) -> bool:
        """True if some layers are mixtures of experts."""
        return any(self.source.get(key) for key in _EXPERTS)

    @property
    def longest_len(self) -> int:
        """Largest allowed `max_model_len`: as in vLLM, the length after linear or yarn scaling."""
        base = {"linear": self.max_position_embeddings, "yarn": self.rope.original_max_position_embeddings}
        scaled = min(base.get(self.rope.type, 0) * self.rope.factor, _MOST)
        return max(self.max_position_embeddings, int(scaled))

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Reads an integer of config.json that only one architecture uses; `default` if it is absent.

        Raises:
            ModelError: it is missing without a default, or not a whole number of at least `least`.
        """
        value = self.source.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json: {key} is {value!r}; it must be an integer of at least {least}")
        if value > _MOST:
            raise ModelError(f"config.json: {key} is {value}; it must be at most {_MOST}")
        return value

    def slides(self, layer: int) -> bool:
        """True if `layer_types` gives a layer a sliding window.

        Raises:
            ModelError: there is not one type per layer, or one of another kind.
        """
        types = self.listed("layer_types", str) or []
        if len(types) != self.num_hidden_layers:
            raise ModelError(f"config.json: layer_types must list {self.num_hidden_layers} layers")
        if types[layer] not in (FULL_ATTENTION, SLIDING_ATTENTION):
            valid = f"{FULL_ATTENTION}, {SLIDING_ATTENTION}"
            raise ModelError(f"config.json: layer type {types[layer]!r} is not supported; supported: {valid}")
        return bool(types[layer] == SLIDING_ATTENTION)

    def listed_window(self, layer: int) -> int | None:
        """The sliding window of a layer that `layer_types` calls sliding; None for other layers.

        Raises:
            ModelError: see `slides`, or there is no window's length.
        """
        return self.count("sliding_window") if self.slides(layer) else None

    def listed(self, key: str, kind: type[Entry]) -> list[Entry] | None:
        """Reads a list of config.json whose entries all have one type; None if it is absent.

        Raises:
            ModelError: it is another one.
        """
        value = self.source.get(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            raise ModelError(f"config.json: {key} is {value!r}; it must be a list of {_KINDS[kind]}")
        return value

    def number(self, key: str) -> float:
        """Reads a real number of config.json.

        Raises:
            ModelError: it is not one.
        """
        with _as_model_error():
            return _number(self.source, key)

    def positive(self, key: str) -> float:
        """Reads a finite number above 0 of config.json.

        Raises:
            ModelError: it is not one.
        """
        with _as_model_error():
            return _positive(self.source, key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True if the boolean `key` of config.json is true.

        Raises:
            ModelError: the entry is not a boolean.
        """
        with _as_model_error():
            return _flag(self.source, key, default)


@contextlib.contextmanager
def _as_model_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from None


def read_config(model: Path) -> tuple[Path, dict[str, Any]]:
    """Entries of config.json, with the file they come from: a folder's own, or the metadata of a GGUF file.

    Raises:
        ModelError: there is no model, or the file is malformed.
    """
    try:
        files = gguf_files(model)
        if files:
            return files[0], gguf_config(read_gguf(files))
    except UnreadableFileError as error:
        raise ModelError(str(error)) from None
    if not model.is_dir():
        raise ModelError(f"{model} does not exist; give a checkpoint folder, a GGUF file, or org/name on the Hub")
    config = _read_json(model / "config.json")
    if config is None:
        raise ModelError(f"{model} has no config.json; give a Hugging Face checkpoint folder or a GGUF file")
    return model / "config.json", _text_part(config)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = read_json_file(path, MAX_CONFIG_FILE_BYTES)
    except UnreadableFileError as error:
        raise ModelError(f"{error}; download the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download the checkpoint again")
    return content


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a multimodal model's text part, completed by entries of the whole; other files as they are."""
    named, text = config.get("architectures"), config.get("text_config")
    if not isinstance(named, list) or not isinstance(text, dict):
        return config
    name = next((each for each in map(str, named) if each in text_part_arch_dict), None)
    if name is None:
        return config
    part, expected = text_part_arch_dict[name]
    if (found := text.get("model_type", expected)) != expected:
        raise ModelError(f"text_config: model_type {found!r} is not supported in {name}; supported: {expected}")
    whole = {key: config[key] for key in _OF_WHOLE if key in config}
    return {**whole, **text, "architectures": [part], "model_type": model_type(part)}


def _parse(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    architectures: Collection[str],
    settings: Mapping[str, Any] | None,
) -> ModelConfig:
    architecture = _architecture(config, architectures)
    decoder, head = parted(architecture)
    settings = read_settings(config, _model_type(config, decoder)) if settings is None else settings
    hidden_size = _count(settings, "hidden_size")
    heads = _count(settings, "num_attention_heads")
    kv_heads = _count(settings, "num_key_value_heads")
    # Mixtral's config class has no head_dim if config.json has none.
    head_dim = _count(settings, "head_dim", hidden_size // heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    experts = max((n for key in _EXPERTS if type(n := settings.get(key)) is int), default=0)
    if min(experts, MAX_MODEL_EXPERTS) * _count(settings, "num_hidden_layers") > MAX_ALL_EXPERTS:
        raise ModelError(f"{experts} experts in each layer are too many; at most {MAX_ALL_EXPERTS} in all layers")
    rope, local_rope = ropes(settings)
    if not rope.rotary_dim(head_dim) or rope.rotary_dim(head_dim) % 2:
        # With latent attention, the config class sets head_dim to qk_rope_head_dim: name the entry that the user has.
        name = "qk_rope_head_dim" if "qk_rope_head_dim" in settings else "head_dim"
        rotary = f"{name} {head_dim}, of which {rope.rotary_dim(head_dim)} are rotated"
        raise ModelError(f"{rotary}: rotary embeddings need an even number")
    wanted = rope.rotary_dim(head_dim) // 2
    if rope.type == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {wanted}:
        raise ModelError(f"short_factor and long_factor of longrope must list {wanted} numbers each")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_hidden_layers=_count(settings, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(settings, "intermediate_size"),
        vocab_size=_count(settings, "vocab_size"),
        rms_norm_eps=_positive(settings, "rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        tie_word_embeddings=head == OUTPUT_HEAD and _flag(settings, "tie_word_embeddings", False),
        attention_bias=_flag(settings, "attention_bias", False),
        mlp_bias=_flag(settings, "mlp_bias", False),
        max_position_embeddings=_count(settings, "max_position_embeddings"),
        dtype=_dtype(config),
        bos_token_id=_bos_token_id(generation, config),
        eos_token_ids=_eos_token_ids(generation, config),
        sampling_defaults=model_defaults(generation),
        quant_config=parse_quantization(config),
        head=head,
        num_labels=_num_labels(config) if head == CLASSIFIER else 0,
        source=settings,
    )


def _model_type(config: Mapping[str, Any], decoder: str) -> str:
    """The `model_type` of the decoder's config class in `transformers`.

    Raises:
        ModelError: `model_type` names another model of `transformers`, which computes something else.
    """
    if decoder in draft_head_arch_dict:
        # `transformers` has no draft heads; their config.json has Llama's entries.
        return "llama"
    expected = model_type(decoder)
    if is_of_other_model(named := config.get("model_type"), expected):
        raise ModelError(f"model_type {named!r} does not fit the architecture {decoder}; {expected!r} does")
    return expected


def _architecture(config: Mapping[str, Any], supported: Collection[str]) -> str:
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"architectures is {named!r}; it must be a list of names")
    for architecture in named:
        if architecture in supported or parted(architecture)[0] in supported:
            return str(architecture)
    for architecture in named:
        if architecture in refused_arch_dict:
            raise ModelError(f"architecture not supported: {architecture}: {refused_arch_dict[architecture]}")
    found = ", ".join(named) or "none named"
    relatives = ", and the same with Model or ForSequenceClassification at the end" if _have_heads(supported) else ""
    raise ModelError(f"architecture not supported: {found}; supported: {', '.join(supported)}{relatives}")


def _have_heads(architectures: Collection[str]) -> bool:
    """True if checkpoints of these architectures may have another head. Draft models may not."""
    return all(name in support_model_arch_dict for name in architectures)


def _num_labels(config: Mapping[str, Any]) -> int:
    """Number of a classifier's labels: as many as have names; 2 without names, as in `transformers`."""
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) and names else _count(config, "num_labels", 2)


def _is_decoder_alone(folder: Path) -> bool:
    """True if the weights are a decoder without a head, whatever config.json names: no tensor has the prefix `model.`,
    which a decoder has inside of a model with a head."""
    names = stored_names(folder)
    return _EMBEDDING in names and _OUTPUT not in names


def ropes(settings: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """`rope` and `local_rope`, from `rope_parameters`, which the config classes fill in from every spelling."""
    parameters: Mapping[str, Any] = settings["rope_parameters"]
    if FULL_ATTENTION not in parameters:
        return rope_config(settings, parameters), None
    for name in (FULL_ATTENTION, SLIDING_ATTENTION):
        # transformers reads this entry of a type of layers at another place, where it is absent.
        if parameters[name].get("truncate", True) is not True:
            raise ValueError(f"truncate of {name} is {parameters[name]['truncate']!r}; it must be true")
    return rope_config(settings, parameters[FULL_ATTENTION]), rope_config(settings, parameters[SLIDING_ATTENTION])


def rope_config(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeConfig:
    """One rotary embedding, from its `parameters`."""
    kind = parameters["rope_type"]
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    rope = RopeConfig(
        theta=_positive(parameters, "rope_theta"),
        type=kind,
        partial_rotary_factor=_positive(parameters, "partial_rotary_factor", 1.0),
    )
    if rope.partial_rotary_factor > 1.0:
        raise ValueError(f"partial_rotary_factor is {rope.partial_rotary_factor}; it must be above 0 and at most 1")
    if kind == "linear":
        return replace(rope, factor=_positive(parameters, "factor"))
    if kind == "llama3":
        low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
        if low == high:
            raise ValueError(f"low_freq_factor and high_freq_factor are both {low}; they must differ")
        return replace(
            rope,
            factor=_positive(parameters, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=_count(parameters, "original_max_position_embeddings"),
        )
    if kind == "longrope":
        return _longrope(rope, parameters, settings)
    return _yarn(rope, parameters, settings) if kind == "yarn" else rope


def _longrope(rope: RopeConfig, parameters: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeConfig:
    """Reads longrope as transformers does: both lengths replace a missing `factor`, which replaces a missing
    `attention_factor`."""
    original = _count(parameters, "original_max_position_embeddings")
    factor = _positive(parameters, "factor", _count(settings, "max_position_embeddings") / original)
    attention_factor = 1.0
    if factor > 1.0 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_positive(parameters, "attention_factor", attention_factor),
        short_factors=_positives(parameters, "short_factor"),
        long_factors=_positives(parameters, "long_factor"),
    )


def _positives(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    listed = parameters[key]
    if not isinstance(listed, list):
        raise ValueError(f"{key} is {listed!r}; it must be a list of numbers")
    return tuple(_positive({f"{key}[{i}]": value}, f"{key}[{i}]") for i, value in enumerate(listed))


def _yarn(rope: RopeConfig, parameters: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeConfig:
    """Reads yarn as transformers does: both lengths replace a missing `factor`, both mscales a missing
    `attention_factor`."""
    if rope.theta <= 1.0:
        raise ValueError(f"rope_theta is {rope.theta:g}; it must be above 1 with yarn")
    original = _count(parameters, "original_max_position_embeddings")
    longest = _count(settings, "max_position_embeddings")
    factor = _positive(parameters, "factor", longest / original)
    mscale, all_dim = _number(parameters, "mscale", 0.0), _number(parameters, "mscale_all_dim", 0.0)
    attention_factor = yarn_mscale(factor)
    if mscale and all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_positive(parameters, "attention_factor", attention_factor),
        beta_fast=_positive({"beta_fast": parameters.get("beta_fast") or RopeConfig.beta_fast}, "beta_fast"),
        beta_slow=_positive({"beta_slow": parameters.get("beta_slow") or RopeConfig.beta_slow}, "beta_slow"),
        truncate=_flag(parameters, "truncate", True),
        mscale_all_dim=all_dim,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Factor by which attention is sharpened when positions are stretched by `factor` (arXiv:2309.00071, section
    3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _count(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _given(settings, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a positive integer")
    if value > _MOST:
        raise ValueError(f"{key} is {value}; it must be at most {_MOST}")
    return value


def _positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Checks that a number is finite and above 0: others make every result NaN."""
    value = _given(settings, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value <= _LARGEST:
        raise ValueError(f"{key} is {value!r}; it must be a number above 0")
    return float(value)


def _number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _given(settings, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{key} is {value!r}; it must be a number")
    return float(value)


def _flag(settings: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    value = _given(settings, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; it must be true or false")
    return value


def _given(settings: Mapping[str, Any], key: str, default: Any) -> Any:
    value = settings.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is {'null' if key in settings else 'missing'}")
    return value


def _bos_token_id(generation: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    key = "bos_token_id"
    value = config.get(key) if generation.get(key) is None else generation[key]
    return next(iter(_token_ids(key, value)), None)


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of both files: one file alone may lack the id that ends a turn."""
    key = "eos_token_id"
    return tuple(dict.fromkeys(_token_ids(key, generation.get(key)) + _token_ids(key, config.get(key))))


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ValueError(f"{key} is {value!r}; it must be a token id, or a list of them")
    return tuple(ids)
