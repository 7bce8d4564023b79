"""The mark that stands for a token where there is none. No PyTorch here."""

from typing import Final

# Result of samplers for a row of logits whose largest number is not finite.
NO_TOKEN: Final = -1
