"""The derived seed never changes: streams of old request ids would."""

from __future__ import annotations

import hashlib

from fissile.seed import derive_seed


def test_known_answer() -> None:
    # BLAKE2b-512("abc") begins ba80a53f981c4d0d (RFC 7693, appendix A).
    assert derive_seed("abc") == 0x0D4D1C983FA580BA
    assert derive_seed("é") == int.from_bytes(hashlib.blake2b("é".encode()).digest()[:8], "little")
    assert derive_seed("") != derive_seed(" ")
