"""MXFP4 (OCP MX specification 1.0) of weights that are floats, in the layout of packed_weight.PackedWeight."""

from __future__ import annotations

import torch

from kernels.triton_backend.packed_weight import GROUP

# Numbers that share a scale.
SCALE_GROUP = 32
_BIAS = 127
# 2^-100: smaller numbers are rounded to zero.
_LEAST_EXPONENT = -100
# E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A number's index is how many of these borders are below it; a number on a
# border goes to the even index.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_UPWARD = (0.75, 1.75, 3.5)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight [N, K] to numbers uint8 [N, K' / 2] and scales uint8 [N, K' / 32]; K' is K rounded up to 128.

    A scale is an exponent of 2 with a bias of 127, the largest that its numbers need, as in section 6.3 of the
    specification. So a weight that was MXFP4 once is kept exactly. A group with a number that is not finite is NaN.
    """
    rows, inner = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -inner % GROUP)).view(rows, -1, SCALE_GROUP)
    largest = groups.abs().amax(2)
    finite = largest.isfinite()
    # The largest number begins with 2^2.
    exponents = (torch.frexp(largest).exponent - 3).clamp_(min=_LEAST_EXPONENT)
    multiples = torch.where(finite.unsqueeze(2), torch.ldexp(groups, -exponents.unsqueeze(2)), 0.0)
    halves = _codes(multiples).view(rows, -1, 2, GROUP // 2)
    scales = torch.where(finite, exponents + _BIAS, 255).to(torch.uint8)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1), scales


def _codes(multiples: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of the nearest E2M1 values: sign, and index of the magnitude."""
    borders = torch.tensor(_BORDERS)
    upward = torch.isin(borders, torch.tensor(_UPWARD))
    borders = torch.where(upward, torch.nextafter(borders, torch.zeros(())), borders).to(multiples.device)
    sizes = torch.bucketize(multiples.abs(), borders, out_int32=True).to(torch.uint8)
    return sizes | (multiples.signbit().to(torch.uint8) << 3)
