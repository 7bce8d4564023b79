"""Checkpoints without an output head: states and labels equal `transformers`, and bits never vary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from common.errors import NoOutputHeadError
from common.params.pooling import LABELS, LAST, Pooling
from common.wire.heads import CLASSIFIER, NO_HEAD
from kernels.select import CPU_BACKENDS
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.covering import slow_but
from tests.native import backend_or_skip
from tests.parity.test_embeddings import POOLINGS, bits, engine, engines, pooled, prompts
from tests.parity.test_ranks import Ranks
from worker.config.model_config import ModelConfig, ModelError
from worker.llm_engine import LLMEngine

pytestmark = pytest.mark.each_value

# Architectures for which `transformers` has a classifier.
CLASSIFYING = [name for name in ARCHITECTURES if name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]


@pytest.mark.parametrize("architecture", slow_but({"qwen3", "gpt_oss", "deepseek_v32"}, ARCHITECTURES))
def test_hidden_states_of_headless_decoder_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """Checkpoints as `AutoModel` saves them, without the prefix `model.`, of each architecture."""
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path, architecture, num_hidden_layers=2, head=NO_HEAD)
    assert not any(name.startswith(("model.", "lm_head.")) for name in load_file(folder / "model.safetensors"))
    reference: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    served = engine(folder, backend_or_skip("cpu").name, max_num_batched_tokens=29)
    for pooling in POOLINGS:
        found = served.embed(prompts(), pooling, normalize=False)
        for prompt, vector in zip(prompts(), found, strict=True):
            with torch.inference_mode():
                states = reference(torch.tensor([prompt])).last_hidden_state[0].double()
            expected = states[-1] if pooling == LAST else states.mean(0)
            np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4, rtol=1e-4)
    with pytest.raises(NoOutputHeadError, match="no output head"):
        served.generate([prompts()[0]], {"max_tokens": 1})


@pytest.mark.parametrize(("architecture", "num_labels"), [(name, 1 + i % 2) for i, name in enumerate(CLASSIFYING)])
def test_labels_equal_transformers(tmp_path: Path, architecture: str, num_labels: int) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = make_checkpoint(tmp_path, architecture, head=CLASSIFIER, num_hidden_layers=2, num_labels=num_labels)
    reference: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    served = engine(folder, backend_or_skip("cpu").name, max_num_batched_tokens=29)
    found = served.classify(prompts())
    for prompt, labels in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(labels, expected, atol=1e-4, rtol=1e-4)
    assert len({labels.tobytes() for labels in found}) == len(found)
    with pytest.raises(NoOutputHeadError):
        served.add_request(prompts()[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    return make_checkpoint(made, "qwen3", num_hidden_layers=2, num_labels=2, head=CLASSIFIER)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", CPU_BACKENDS)
def test_label_scores_are_equal_in_every_setting(folder: Path, kernels: str, dtype: str) -> None:
    """Alone, beside embedded texts, in chunks, from the cache, after a preemption, and one step ahead."""
    kernels = backend_or_skip(kernels).name
    alone = engine(folder, kernels, dtype=dtype)
    expected = [bits(alone.classify([prompt]))[0] for prompt in prompts()]
    assert len(set(expected)) == len(expected)
    for other in engines(folder, kernels, dtype):
        for _ in range(2):
            asked = [other.io.to_embed(prompt, pooling, 0.0) for prompt in prompts() for pooling in (LABELS, *POOLINGS)]
            other._run(asked)
            assert [answer.pooled for answer in asked[:: 1 + len(POOLINGS)]] == expected


def test_ranks_give_equal_bits_in_any_batch(folder: Path) -> None:
    ranks = Ranks(folder, 2)
    members: list[tuple[int, Pooling]] = [(i, LABELS) for i in range(4)]
    together = pooled(ranks, members)
    assert [pooled(ranks, [member])[0] for member in members] == together
    (whole,) = engine(folder, ranks.runners[0].kernels.name).classify([prompts()[0]])
    np.testing.assert_allclose(np.frombuffer(together[0], "<f4"), whole, atol=1e-4, rtol=1e-4)
    ranks.close()


def test_classifier_of_8_bit_model_stays_float32(folder: Path) -> None:
    """Its numbers are products of the 8-bit model's states, equal to Embed's to the bit."""
    kernels = backend_or_skip("cpu").name
    weight = load_file(folder / "model.safetensors")["score.weight"].double().numpy()
    for options in ({}, {"quantize": "int8"}):
        served = engine(folder, kernels, **options)
        (states,) = served.embed([prompts()[0]], LAST, normalize=False)
        (labels,) = served.classify([prompts()[0]])
        np.testing.assert_allclose(labels, weight @ states.astype(np.float64), rtol=1e-6)


def test_packed_weights_include_classifier(folder: Path, tmp_path: Path) -> None:
    options = {"weights_cache": str(tmp_path), "kernels": backend_or_skip("cpu").name}
    first, again = (engine(folder, **options) for _ in range(2))
    assert again.core.runner.mapped_bytes  # type: ignore[attr-defined]
    assert bits(first.classify(prompts())) == bits(again.classify(prompts()))


def renamed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy whose tensors lack the prefix `model.`, as embedding checkpoints on the hub have them."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_headless_decoder_with_language_model_config_is_served(tmp_path: Path) -> None:
    """Embedding checkpoints often keep the name of the model that they were trained from. A tied head is there."""
    kernels = backend_or_skip("cpu").name
    for tied in (True, False):
        whole = make_checkpoint(tmp_path / f"whole{tied}", "qwen3", num_hidden_layers=2, tie_word_embeddings=tied)
        alone = renamed(whole, tmp_path / f"alone{tied}")
        config = ModelConfig.from_folder(alone)
        assert (config.architecture, config.generates) == ("Qwen3ForCausalLM", tied)
        both = engine(whole, kernels), engine(alone, kernels)
        for pooling in POOLINGS:
            assert bits(both[0].embed(prompts(), pooling)) == bits(both[1].embed(prompts(), pooling))
        if tied:
            params = {"max_tokens": 9, "temperature": 0.0}
            asked = [each.generate(prompts(), params) for each in both]
            assert [one["token_ids"] for one in asked[0]] == [one["token_ids"] for one in asked[1]]


def test_missing_tensors_are_named_as_in_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", "qwen3", num_hidden_layers=2, head=NO_HEAD)
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.self_attn.q_norm.weight"]
    save_file({**tensors, "layers.9.x": torch.zeros(1)}, folder / "model.safetensors")
    said = r"missing layers\.1\.self_attn\.q_norm\.weight; surplus layers\.9\.x$"
    with pytest.raises(ModelError, match=said):
        engine(folder)


def test_only_a_classifier_classifies(tmp_path: Path) -> None:
    served = LLMEngine(str(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, head=NO_HEAD)))
    with pytest.raises(ModelError, match="Qwen3Model has no classifier"):
        served.classify(["a"])
