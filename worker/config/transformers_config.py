"""Reads the settings of config.json with the config classes of `transformers`: defaults, both spellings, rope.

Nothing is downloaded, and no code of a checkpoint runs. The architecture selects a config class, which gets the entries
of config.json as a mapping. This module and `model_config` add bounds, and one-line errors that name the entry.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Final

from common.limits import MAX_MODEL_LAYERS
from common.text.deferred_torch import deferred_torch

# Entries that the classes do not get. With a dtype they import PyTorch, and for each label they make a name. Their
# defaults for special token ids are the ids of the family's first model.
_READ_HERE: Final = frozenset(
    ("dtype", "torch_dtype", "num_labels", "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id")
)
# Entries that change the meaning of other entries.
_REFUSED: Final = ("per_layer_config", "attribute_map")
# Spelling of transformers 4; a property of the classes of transformers 5.
_OLD_ROPE: Final = "rope_scaling"
_ROPE: Final = "rope_parameters"
# Types of layers that may have rope parameters of their own.
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
# Types of settings. The classes have attributes of other types, which are internal.
_JSON: Final = (str, int, float, list, dict, NoneType)
# Entries -> greatest value. The classes make lists of these lengths, or divide by these numbers.
_BOUNDED: Final = {"num_hidden_layers": MAX_MODEL_LAYERS, "num_attention_heads": 2**31 - 1}
_LOGGER: Final = "transformers"
# Beginning of the classes' error message about a value.
_FIELD: Final = re.compile("Validation error for field '([^']+)'")
# Types of entries, in words for error messages.
_KINDS: Final = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of names",
    "None": "null",
    "str": "a string",
}


def read_settings(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """All settings of a model, as JSON values: entries of config.json, the class's defaults for others, and the rope.

    Args:
        config: content of config.json.
        model_type: selects the config class of `transformers`.

    Raises:
        ValueError, TypeError: an entry is malformed or refused; the message is one line that names it.
    """
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(f"{name} is not supported; leave it out")
    config_class: Any = _config_classes()[model_type]
    _check_rope(config, config_class)
    for name, most in _BOUNDED.items():
        value = config.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; it must be 1 to {most}")
    # A derived class checks the type of each entry, but does not compare entries with each other. The comparisons
    # refuse models that can run, such as one with a head_dim whose hidden size is no multiple of the heads.
    derived: Any = type(config_class.__name__, (config_class,), {})
    # Imported late, as `transformers` is, which imports huggingface_hub anyway.
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415

    try:
        with _silence():
            read = derived(**_entries(config, config_class))
            read.standardize_rope_params()
    except StrictDataclassError as error:
        raise ValueError(_named(error, config, config_class)) from None
    except IndexError:
        raise ValueError("a list has fewer entries than there are layers") from None
    except RecursionError:
        raise ValueError(f"{_deepest(config)} is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"{type(error).__name__}: {_one_line(error)}") from None
    settings = {name: value for name, value in vars(read).items() if _is_setting(name, value)}
    return settings | {alias: settings[name] for alias, name in config_class.attribute_map.items() if name in settings}


def is_of_other_model(model_type: object, expected: str) -> bool:
    """True if `model_type` names a model of `transformers` other than the `expected` one."""
    return model_type != expected and isinstance(model_type, str) and model_type in _config_classes()


def _config_classes() -> Any:
    """Config classes of `transformers` by `model_type`. The first call takes almost a second and 30 MB."""
    logger = logging.getLogger(_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with deferred_torch():
            # The logger is off, because `transformers` without PyTorch advises to install PyTorch.
            from transformers import CONFIG_MAPPING  # noqa: PLC0415
    finally:
        logger.disabled = was_disabled
    return CONFIG_MAPPING


def _check_rope(config: Mapping[str, Any], config_class: Any) -> None:
    for name in (_ROPE, _OLD_ROPE):
        rope = config.get(name)
        if rope is not None and not isinstance(rope, Mapping):
            raise ValueError(f"{name} is {rope!r}; it must be an object")
        for kind in _LAYER_TYPES:
            if not isinstance((rope or {}).get(kind), Mapping | None):
                raise ValueError(f"{kind} of {name} is {(rope or {})[kind]!r}; it must be an object")
        if _differs_by_layer(rope) and not _differs_by_layer(config_class().rope_parameters):
            raise ValueError(f"{name} differs by layer, which is not supported; give one for all layers")


def _differs_by_layer(rope: Mapping[str, Any] | None) -> bool:
    """True for rope parameters by type of layer."""
    return any(isinstance(value, Mapping) for value in (rope or {}).values())


def _entries(config: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Entries of config.json that are settings; drops names of the class's methods and private attributes."""
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map, _OLD_ROPE}
    return {
        name: _as_number_of(getattr(config_class, name, None), value)
        for name, value in copy.deepcopy(dict(config)).items()
        if name not in _READ_HERE and (name in known or not (name.startswith("_") or hasattr(config_class, name)))
    }


def _is_setting(name: str, value: object) -> bool:
    return name not in _READ_HERE and not name.startswith("_") and isinstance(value, _JSON)


def _deepest(config: Mapping[str, Any]) -> str:
    """Name of the entry that is nested most deeply."""
    rows = {name: [value] for name, value in config.items()}
    names = list(rows)
    while rows:
        names = list(rows)
        inner = {
            name: [item for each in row for item in (each.values() if isinstance(each, Mapping) else each)]
            for name, values in rows.items()
            if (row := [each for each in values if isinstance(each, Mapping | list)])
        }
        rows = {name: values for name, values in inner.items() if values}
    return names[0]


def _as_number_of(default: object, value: Any) -> Any:
    """Converts an integer to a float if `default` is one: JSON may write 1 for 1.0, which the classes refuse."""
    # A class refuses an integer that no float holds.
    fits = isinstance(default, float) and type(value) is int and abs(value) <= sys.float_info.max
    return float(value) if fits else value


def _named(error: Exception, config: Mapping[str, Any], config_class: Any) -> str:
    """One-line error message for an entry whose type the class refuses."""
    found = _FIELD.match(str(error))
    if found is None:
        return _one_line(error)
    name = found[1]
    aliases = (alias for alias, own in config_class.attribute_map.items() if own == name and alias in config)
    spelled, kind = next(aliases, name), config_class.__dataclass_fields__[name].type
    kinds = kind.__name__ if isinstance(kind, type) else str(kind)
    words = (_KINDS.get(each) or _KINDS.get(each.partition("[")[0], each) for each in kinds.split(" | "))
    wanted = " or ".join(dict.fromkeys(words))
    return f"{spelled} is {config.get(spelled)!r}; it must be {wanted}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps warnings of `transformers` off stderr: settings that matter are refused with a ModelError."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
