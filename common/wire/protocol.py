"""Versions of the Session protocol between routers and workers, and the features that each added."""

from __future__ import annotations

from typing import Final

# Minor version that this release speaks. Versions one below and one above are served.
PROTO_MINOR: Final = 2
# From this version on a worker sends a snapshot of its prefix cache on request (`Lane.kv_epoch`).
KV_EPOCH_MINOR: Final = 1
# From this version on routers can adopt sequences of routers that are gone (S12), and workers announce them.
ADOPTION_MINOR: Final = 2
# Names of optional features of workers (`GetWorkerResponse.features`). The last two are roles.
LOGPROBS_FEATURE: Final = "logprobs"
EMBED_FEATURE: Final = "embed"
PREFILL_FEATURE: Final = "prefill"
DECODE_FEATURE: Final = "decode"
