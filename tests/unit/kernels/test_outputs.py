"""The mark by which back ends' tests fail where PyTorch reallocates an output."""

from __future__ import annotations

import gc
import socket
import warnings

import pytest
import torch

from tests.unit.kernels.outputs import FIXED_OUTPUTS

pytestmark = FIXED_OUTPUTS


def test_reallocated_output_is_an_error() -> None:
    out = torch.zeros(3)
    with pytest.raises(UserWarning, match="resized"):
        torch.add(torch.zeros(4), 1, out=out)


def test_warnings_of_other_tests_do_not_fail_outputs_test() -> None:
    """`test_linear` once failed for a socket that a test before it had left: every warning was an error there."""
    left = [socket.socket()]
    left.append(left)  # type: ignore[arg-type]
    del left
    with warnings.catch_warnings(record=True):
        gc.collect()
