from __future__ import annotations

import pytest

from kernels.select import select_backend


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_there(name: str) -> None:
    assert select_backend(name).name == "torch"


def test_unknown_name_says_the_choices() -> None:
    with pytest.raises(ValueError, match="'cuda' is not known; choose one of: auto, torch, cpu"):
        select_backend("cuda")
