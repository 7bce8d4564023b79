"""Special tokens of an engine's config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.text.tokenizer import TokenizerError
from tests.checkpoints import EOS_ID, IM_END_ID, SPECIAL_TOKENS, write_tokenizer
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.config.model_tokenizer import tokenizer_eos_id


def test_every_end_of_sequence_id_counts(tmp_path: Path) -> None:
    model = model_of(tmp_path, generation={"eos_token_id": [5, 6, 7], "bos_token_id": 1})
    config = with_special_tokens(Config(), model)
    assert (config.bos_token_id, config.eos_token_id, config.stop_token_ids) == (1, 5, (6, 7))
    assert with_special_tokens(Config(), replace(model, eos_token_ids=())).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("config_json", "generation", "own", "expected"),
    [
        (None, None, 3, [3]),
        (2, None, 3, [2, 3]),
        (2, [5, 6], 3, [5, 6, 2, 3]),
        (2, [5, 2, 3], 3, [5, 2, 3]),
        (None, 5, None, [5]),
    ],
)
def test_tokenizer_eos_token_is_added_to_the_models_ids(
    tmp_path: Path, config_json: int | None, generation: Any, own: int | None, expected: list[int]
) -> None:
    """Former fault: a fine-tune that names its end of turn only in tokenizer_config.json never stopped."""
    model = model_of(tmp_path, eos_token_id=config_json, generation={"eos_token_id": generation})
    write_tokenizer(tmp_path, 300)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = None if own is None else SPECIAL_TOKENS[own]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = with_special_tokens(Config(model=str(tmp_path)), model)
    assert [config.eos_token_id, *config.stop_token_ids] == expected
    assert config.can_constrain
    assert with_special_tokens(replace(config, stop_token_ids=(1,)), model).stop_token_ids == (1,)


def test_tokenizer_eos_outside_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    assert tokenizer_eos_id(tmp_path) == EOS_ID
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<|over|>"})
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for text, found in (("<|over|>", 300), ({"content": "<|im_end|>"}, IM_END_ID), ("<|absent|>", None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": text}))
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert tokenizer_eos_id(tmp_path) == found
    model = model_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|over|>"}))
    assert with_special_tokens(Config(model=str(tmp_path)), model).eos_token_ids == frozenset()


@pytest.mark.parametrize("content", ['{"added_tokens": 5}', '{"model": {"vocab": [1]}}', "[]"])
def test_malformed_tokenizer_raises_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    with pytest.raises(TokenizerError) as raised:
        tokenizer_eos_id(tmp_path)
    assert "\n" not in str(raised.value)


def model_of(folder: Path, generation: dict[str, Any] | None = None, **entries: Any) -> ModelConfig:
    """The configuration of a small Llama, whose files it writes into `folder`."""
    shape = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 8)
    written = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 8, "head_dim": 8, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(written | shape | entries))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    return ModelConfig.from_folder(folder)
