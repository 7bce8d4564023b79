"""The drafts of the demo model with `fissile serve --speculate`."""

from __future__ import annotations

import pytest

from common.cli.core.errors import CommandError
from common.cli.serve.command import DEMO_HEAD, demo_speculation
from common.config import SpeculativeConfig
from common.params.options.types import Speculation


def test_serve_speculate_is_only_for_demo_model() -> None:
    assert Speculation().read(demo_speculation(None, None)) == SpeculativeConfig(3, "eagle3", str(DEMO_HEAD))
    assert (DEMO_HEAD / "model.safetensors").is_file()
    for model, given in (("/models/own", None), (None, "{}")):
        with pytest.raises(CommandError, match="leave it out with --model or --speculative-config"):
            demo_speculation(model, given)
