"""Versions of the Session protocol between routers and workers, and what came with each."""

from __future__ import annotations

from typing import Final

# Minor version that this release speaks. Versions one below and one above are served.
PROTO_MINOR: Final = 2
# From this one on a worker sends a snapshot of its prefix cache when it is asked (`Lane.kv_epoch`).
KV_EPOCH_MINOR: Final = 1
# From this one on a worker lets routers adopt sequences of others that are gone (S12), and a router is told of them.
ADOPTION_MINOR: Final = 2
# Names of what not every worker does (`GetWorkerResponse.features`).
LOGPROBS_FEATURE: Final = "logprobs"
EMBED_FEATURE: Final = "embed"
