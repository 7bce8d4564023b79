"""Reads the settings of config.json as the config classes of `transformers` do: defaults, both spellings, rope.

Nothing is downloaded, and no code of a checkpoint runs: the architecture chooses a class, which gets the entries of a
file that was read before. This module and `model_config` add bounds, and errors of one line that name the entry.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Final

from common.deferred_torch import deferred_torch
from common.limits import MAX_MODEL_LAYERS

# Entries that the classes do not get. With a dtype they import PyTorch, for each label they make a name, and ids of
# special tokens that no file names are those of the family's first model.
_READ_HERE: Final = frozenset(
    ("dtype", "torch_dtype", "num_labels", "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id")
)
# Entries that give others another meaning.
_REFUSED: Final = ("per_layer_config", "attribute_map")
# Spelling of transformers 4, which is a property of the classes of 5.
_OLD_ROPE: Final = "rope_scaling"
_ROPE: Final = "rope_parameters"
# Kinds of entries; the classes have others for themselves.
_JSON: Final = (str, int, float, list, dict, NoneType)
# Entries of which the classes make lists, or by which they divide.
_BOUNDED: Final = {"num_hidden_layers": MAX_MODEL_LAYERS, "num_attention_heads": 2**31 - 1}
_LOGGER: Final = "transformers"
# How the classes begin what they say of a value.
_FIELD: Final = re.compile("Validation error for field '([^']+)'")
# Types of entries, for people.
_KINDS: Final = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "None": "null",
    "str": "a string",
}


def read_settings(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Every setting of a model: what config.json says, what the class takes for absent entries, and its rope; as JSON.

    Args:
        config: content of config.json.
        model_type: name of the class's model in `transformers`.

    Raises:
        ValueError, TypeError: an entry is malformed or refused; one line that names it.
    """
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(f"{name} is not supported; leave it out")
    _check_rope(config)
    for name, most in _BOUNDED.items():
        value = config.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; it must be 1 to {most}")
    config_class: Any = _config_classes()[model_type]
    # A derived class checks the type of each entry, but does not compare entries with each other. Those checks
    # refuse models that can run: a hidden size that is no multiple of the heads, although there is a head_dim.
    derived: Any = type(config_class.__name__, (config_class,), {})
    # Known only when it has been imported.
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415

    try:
        with _silence():
            read = derived(**_entries(config, config_class))
            read.standardize_rope_params()
    except StrictDataclassError as error:
        raise ValueError(_named(error, config, config_class)) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {_one_line(error)}") from None
    settings = {name: value for name, value in vars(read).items() if _is_setting(name, value)}
    return settings | {alias: settings[name] for alias, name in config_class.attribute_map.items() if name in settings}


def is_of_other_model(model_type: object, expected: str) -> bool:
    """True if `model_type` names a model of `transformers` other than the `expected` one."""
    return model_type != expected and isinstance(model_type, str) and model_type in _config_classes()


def _config_classes() -> Any:
    """Config classes of `transformers` by `model_type`; loads most of a second and 30 MB the first time."""
    logger = logging.getLogger(_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with deferred_torch():
            # Without PyTorch it advises to install it.
            from transformers import CONFIG_MAPPING  # noqa: PLC0415
    finally:
        logger.disabled = was_disabled
    return CONFIG_MAPPING


def _check_rope(config: Mapping[str, Any]) -> None:
    for name in (_ROPE, _OLD_ROPE):
        rope = config.get(name)
        if rope is not None and not isinstance(rope, Mapping):
            raise ValueError(f"{name} is {rope!r}; it must be an object")
        if any(isinstance(value, Mapping) for value in (rope or {}).values()):
            raise ValueError(f"{name} differs by layer, which is not supported; give one for all layers")


def _entries(config: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Entries that are settings; names of the class's methods and of its own description are none."""
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map, _OLD_ROPE}
    return {
        name: _as_number_of(getattr(config_class, name, None), value)
        for name, value in copy.deepcopy(dict(config)).items()
        if name not in _READ_HERE and (name in known or not (name.startswith("_") or hasattr(config_class, name)))
    }


def _is_setting(name: str, value: object) -> bool:
    return name not in _READ_HERE and not name.startswith("_") and isinstance(value, _JSON)


def _as_number_of(default: object, value: Any) -> Any:
    """`value`, as a float where the default is one: JSON writes 1 for 1.0, which the classes refuse."""
    return float(value) if isinstance(default, float) and type(value) is int else value


def _named(error: Exception, config: Mapping[str, Any], config_class: Any) -> str:
    """A line for an entry of another type than its class says."""
    found = _FIELD.match(str(error))
    if found is None:
        return _one_line(error)
    name = found[1]
    aliases = (alias for alias, own in config_class.attribute_map.items() if own == name and alias in config)
    spelled, kind = next(aliases, name), config_class.__dataclass_fields__[name].type
    kinds = kind.__name__ if isinstance(kind, type) else str(kind)
    wanted = " or ".join(dict.fromkeys(_KINDS.get(each.partition("[")[0], each) for each in kinds.split(" | ")))
    return f"{spelled} is {config.get(spelled)!r}; it must be {wanted}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps warnings of `transformers` off stderr: what matters of them is refused with a ModelError."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
