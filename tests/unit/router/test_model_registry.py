"""ModelRegistry: the weights that new requests get, and the error if no worker serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidFieldError, NoWorkerError, UnknownModelError
from router.model_registry import ModelRegistry, ServedModel, TextAssets
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
def test_workers_of_one_model_may_differ(change: dict[str, object]) -> None:
    """The first differing worker is logged with its difference, all count, and the majority is described."""
    registry = ModelRegistry()
    other = replace(MODEL, **change)  # type: ignore[arg-type]
    assert registry.admit("w1", MODEL) == registry.admit("w2", MODEL) == ""
    assert next(iter(change)) in registry.admit("w3", other)
    assert registry.admit("w4", other) == ""
    assert registry.admit("k", replace(other, name="k")) == ""
    assert registry.ready_workers("m") == 4
    assert not registry.is_replaced("m", MODEL.identity)
    registry.release("w1")
    assert registry.get("m") == other
    registry.admit("w2", other)
    assert registry.is_replaced("m", MODEL.identity)
    assert registry.choose("m", "x") == other
    for worker in ("w2", "w3", "w4"):
        registry.release(worker)
    assert not registry.is_replaced("m", MODEL.identity)
    assert registry.get("m") == other


def weights(registry: ModelRegistry, keys: int = 2000) -> list[str]:
    """Weight digests of requests, by key."""
    return [registry.choose("m", f"key {i}").weights_digest for i in range(keys)]


def test_new_requests_are_shared_by_ready_workers_and_routers_choose_alike() -> None:
    """In a roll from 4 old workers to 4 new ones, each key changes its weights once."""
    new = replace(MODEL, weights_digest="new")
    registry = ModelRegistry()
    for i in range(4):
        registry.admit(f"w{i}", MODEL)
    before = weights(registry)
    assert set(before) == {"bb"}
    for i in range(4):
        registry.release(f"w{i}")
        registry.admit(f"w{i}", new)
        other_router = ModelRegistry()
        for j in reversed(range(4)):
            other_router.admit(f"else {j}", new if j <= i else MODEL)
        now = weights(registry)
        assert now == weights(other_router)
        assert now.count("new") == pytest.approx(2000 * (i + 1) / 4, abs=100)
        assert all(is_now in (was, "new") for was, is_now in zip(before, now, strict=True))
        before = now
    assert set(before) == {"new"}


def test_model_without_addresses_stays_known_but_not_default() -> None:
    """A rolled worker may return at another address; until then its model is not NOT_FOUND."""
    registry = ModelRegistry()
    registry.admit("w1", MODEL)
    registry.admit("w2", replace(MODEL, name="k"))
    registry.forget("w1")
    assert registry.get("m") == registry.choose("m", "") == MODEL
    assert registry.ready_workers("m") == 0
    assert registry.get("").name == "k"
    for i in range(40):
        registry.admit("w3", replace(MODEL, name=f"m{i}"))
        registry.forget("w3")
    assert len(registry.models) == 17
    assert not registry.knows("m")


def test_model_length_is_longest_of_workers() -> None:
    """A worker with a shorter length does not shorten the model for other workers."""
    registry = ModelRegistry()
    registry.admit("w1", MODEL)
    registry.admit("w2", replace(MODEL, max_model_len=64))
    assert registry.get("m").max_model_len == 128
    registry.release("w1")
    assert registry.get("m").max_model_len == 64


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
