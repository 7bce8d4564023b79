"""The length rule: lowered silently only when nobody asked for a length."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.errors import InvalidFieldError
from common.text.tokenizer import TokenizerError
from tests.checkpoints import EOS_ID, IM_END_ID, SPECIAL_TOKENS, write_tokenizer
from worker.config.engine_config import with_pool, with_special_tokens
from worker.config.model_config import ModelConfig
from worker.config.special_tokens import tokenizer_eos_id

BLOCK_BYTES = 1000


def pool(model_len: int = 1024, free: int = 400 * BLOCK_BYTES, **options: Any) -> tuple[int, int]:
    """(blocks, length) for a memory of `free` bytes; a quarter of it, 100 blocks, is the default."""
    config = with_pool(Config(**options), model_len, lambda size: size // BLOCK_BYTES, free)
    return config.num_kvcache_blocks, config.max_model_len


def test_the_length_is_lowered_to_what_the_cache_holds() -> None:
    assert pool(model_len=1600) == (100, 1600)
    assert pool(model_len=1601) == (100, 1600)
    assert pool(model_len=9999, kv_cache_memory=7 * BLOCK_BYTES) == (7, 112)


def test_a_length_asked_for_enlarges_the_default_cache() -> None:
    assert pool(model_len=9999, max_model_len=3200) == (200, 3200)
    with pytest.raises(InvalidFieldError, match="at most 6400: the free memory"):
        pool(model_len=9999, max_model_len=6401)


def test_both_set_and_contradictory_is_refused() -> None:
    assert pool(max_model_len=112, kv_cache_memory=7 * BLOCK_BYTES) == (7, 112)
    with pytest.raises(InvalidFieldError, match="at most 112: the KV cache"):
        pool(max_model_len=113, kv_cache_memory=7 * BLOCK_BYTES)
    with pytest.raises(InvalidFieldError, match="at most 80: the KV cache"):
        pool(max_model_len=113, num_kvcache_blocks=5)


def test_beyond_the_models_own_length_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="model's own 1024"):
        pool(max_model_len=1025)


def test_no_block_at_all_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="kv_cache_memory"):
        pool(kv_cache_memory=999)


def test_no_more_blocks_than_the_running_set_can_hold() -> None:
    assert pool(model_len=32, max_num_seqs=3) == (6, 32)
    assert pool(model_len=32, max_num_seqs=3, num_kvcache_blocks=50) == (50, 32)


@given(
    st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 300), st.integers(1, 1000), st.sampled_from([1, 16, 32])
)
def test_the_pool_always_holds_the_longest(model_len: int, asked: int, memory: int, free: int, size: int) -> None:
    config = Config(max_model_len=asked, kv_cache_memory=memory, kv_cache_block_size=size)
    try:
        sized = with_pool(config, model_len, lambda size: size // 3, free)
    except InvalidFieldError:
        return
    assert 1 <= sized.max_model_len <= sized.num_kvcache_blocks * size
    assert sized.max_model_len <= model_len
    assert asked in (0, sized.max_model_len)
    if not asked:
        assert sized.num_kvcache_blocks * 3 <= (memory or free)


def test_max_model_len_up_to_scaled_length_is_accepted() -> None:
    """B12: Qwen3's model card allows four times the length; without an option the model's own length applies."""
    sized = partial(with_pool, model_len=640, num_blocks_for=lambda size: size // 1000, free_bytes=10**6, longest=2048)
    assert sized(Config()).max_model_len == 640
    assert sized(Config(max_model_len=2048)).max_model_len == 2048
    with pytest.raises(InvalidFieldError, match="at most with the model's rope scaling 2048"):
        sized(Config(max_model_len=2049))


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
    """B4: a fine-tune that names its end of turn only in tokenizer_config.json never stopped."""
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
