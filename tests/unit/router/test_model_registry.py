"""ModelRegistry: which workers may serve together, and what requests are told when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidFieldError, NoWorkerError, UnknownModelError
from router.model_registry import ModelRegistry, ServedModel, TextAssets, WorkerRefusedError
from tests.unit.router.support import tokenizer_files

MODEL = ServedModel(
    name="m",
    architecture="Qwen3ForCausalLM",
    max_model_len=128,
    vocab_size=300,
    tokenizer_sha256="aa",
    weights_digest="bb",
    block_size=16,
    hash_seed=0,
    text=TextAssets(),
)


def test_names() -> None:
    registry = ModelRegistry()
    with pytest.raises(NoWorkerError):
        registry.get("m")
    registry.admit("w1", MODEL)
    assert registry.get("") == registry.get("m") == MODEL
    with pytest.raises(UnknownModelError, match="models: m"):
        registry.get("x")
    registry.admit("w2", replace(MODEL, name="k"))
    with pytest.raises(InvalidFieldError, match="one of k, m"):
        registry.get("")
    assert [m.name for m in registry.models] == ["k", "m"]


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_sha256": "zz"},
        {"block_size": 32},
        {"hash_seed": 7},
        {"weights_digest": "zz"},
        {"vocab_size": 301},
        {"architecture": "LlamaForCausalLM"},
    ],
)
def test_workers_of_one_model_must_agree(change: dict[str, object]) -> None:
    registry = ModelRegistry()
    other = replace(MODEL, **change)  # type: ignore[arg-type]
    registry.admit("w1", MODEL)
    with pytest.raises(WorkerRefusedError, match=next(iter(change))):
        registry.admit("w2", other)
    assert registry.ready_workers("m") == 1
    registry.admit("w3", replace(other, name="k"))
    registry.release("w1")
    registry.admit("w2", other)
    assert registry.get("m") == other


def test_shortest_length_counts() -> None:
    registry = ModelRegistry()
    registry.admit("w1", MODEL)
    registry.admit("w2", replace(MODEL, max_model_len=64))
    assert registry.get("m").max_model_len == 64
    registry.release("w2")
    assert registry.get("m").max_model_len == 128


def test_model_without_workers_stays_known_until_its_address_serves_another() -> None:
    registry = ModelRegistry()
    registry.admit("w1", MODEL)
    registry.release("w1")
    registry.release("w1")
    assert not registry.serving
    assert registry.get("m") == MODEL
    registry.admit("w1", replace(MODEL, name="k"))
    assert [m.name for m in registry.models] == ["k"]


def test_assets_of_a_folder() -> None:
    assets = TextAssets.from_files(tokenizer_files(generation={"temperature": 0.5}))
    assert assets.tokenizer is not None
    assert assets.template is not None
    assert assets.defaults.temperature == 0.5
    assert TextAssets.from_files(tokenizer_files(chat=False)).template is None
