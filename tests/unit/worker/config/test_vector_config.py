"""What a checkpoint says of vectors and of relevance, in the files that sentence-transformers and vLLM know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.params.pooling import LAST, MEAN
from common.text.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer
from worker.config.model_config import ModelError
from worker.config.vector_config import RelevanceTokens, checkpoint_pooling, relevance_tokens


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, LAST),
        ({"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, MEAN),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, LAST),
        ({"pooling_mode": "mean"}, MEAN),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
        ({"pooling_mode": "max"}, None),
        ({}, LAST),
    ],
)
def test_pooling_comes_from_checkpoint(tmp_path: Path, config: dict[str, Any], pooling: str | None) -> None:
    assert checkpoint_pooling(tmp_path) == LAST
    write(tmp_path, "1_Pooling", config)
    assert checkpoint_pooling(tmp_path) == pooling


def test_modules_json_locates_pooling_and_refuses_projection(tmp_path: Path) -> None:
    """Written by sentence-transformers; a projection after the pooling gives other vectors."""
    kinds = {"0": ("", "Transformer"), "1": ("pool", "Pooling"), "2": ("2_Normalize", "Normalize")}
    modules = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, (path, kind) in kinds.items()
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert checkpoint_pooling(tmp_path) == LAST
    write(tmp_path, "pool", {"pooling_mode": "mean"})
    assert checkpoint_pooling(tmp_path) == MEAN
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([*modules, dense]))
    assert checkpoint_pooling(tmp_path) is None
    for content in ("{", "[1]", '[{"type": "a"}]', "3"):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ModelError, match=r"modules\.json is not a list of modules"):
            checkpoint_pooling(tmp_path)


def test_relevance_is_scored_by_two_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    (yes,), (no,) = (Tokenizer.from_folder(tmp_path).encode_inside(text) for text in ("y", "n"))
    assert relevance_tokens(tmp_path, {}, 300) is None
    named = {"classifier_from_token": ["n", "y"]}
    assert relevance_tokens(tmp_path, named, 300) == RelevanceTokens(yes, no)
    write(tmp_path, "1_LogitScore", {"true_token_id": 9, "false_token_id": 8})
    assert relevance_tokens(tmp_path, named, 300) == RelevanceTokens(9, 8)
    with pytest.raises(ModelError, match="9 and 8; two ids below 9"):
        relevance_tokens(tmp_path, {}, 9)


@pytest.mark.parametrize("texts", ["yes", ["yes"], ["yes", 1], ["\ud800", "y"], ["no such token", "y"], ["y", "y"]])
def test_classifier_tokens_other_than_two_are_refused(tmp_path: Path, texts: Any) -> None:
    write_tokenizer(tmp_path, 300)
    with pytest.raises(ModelError, match=r"two"):
        relevance_tokens(tmp_path, {"classifier_from_token": texts}, 300)


def test_single_token_score_is_no_relevance(tmp_path: Path) -> None:
    write(tmp_path, "1_LogitScore", {"true_token_id": 9, "false_token_id": None})
    assert relevance_tokens(tmp_path, {}, 300) is None


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "1_Pooling/deeper"])
def test_modules_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """A checkpoint may only name files of its own folder."""
    modules = [{"type": "sentence_transformers.models.Pooling", "path": name}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="folders in the same folder are valid"):
        checkpoint_pooling(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_invalid_json_file_is_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, "1_Pooling", content)
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json is not (valid JSON|a JSON object)"):
        checkpoint_pooling(tmp_path)
