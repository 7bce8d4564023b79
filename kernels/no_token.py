"""The placeholder id for "no token". No PyTorch here."""

from typing import Final

# Result of samplers for a row of logits whose largest number is not finite.
NO_TOKEN: Final = -1
