"""docs/reference/models.md lists the registered architectures, and tests/checkpoints.py can make each of them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.checkpoints import ARCHITECTURES
from worker.config.architectures import support_model_arch_dict
from worker.model.architectures import model_class

DOC = Path(__file__).resolve().parents[4] / "docs" / "reference" / "models.md"


def test_models_table_lists_registry() -> None:
    listed = re.findall(r"^\| `(\w+ForCausalLM)` \|", DOC.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(support_model_arch_dict)


def test_every_architecture_has_a_class_and_test_checkpoints() -> None:
    for architecture in support_model_arch_dict:
        assert model_class(architecture).__name__ == architecture
    made = {f"{prefix}ForCausalLM" for prefix, _ in ARCHITECTURES.values()}
    assert made == set(support_model_arch_dict)
