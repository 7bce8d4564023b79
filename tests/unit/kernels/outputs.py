"""A mark for tests in which no output may be reallocated, which would cut fixed buffers loose."""

from __future__ import annotations

from typing import Final

import pytest

# PyTorch's warning of it alone: garbage of tests that ran before warns too, when it is collected.
FIXED_OUTPUTS: Final = pytest.mark.filterwarnings("error:An output with one or more elements was resized:UserWarning")
