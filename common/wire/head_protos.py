"""Heads of checkpoints in the protos between router and worker."""

from __future__ import annotations

from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head

_HEADS: Final[dict[Head, wpb.Head.ValueType]] = {
    OUTPUT_HEAD: wpb.HEAD_UNSPECIFIED,
    NO_HEAD: wpb.HEAD_NONE,
    CLASSIFIER: wpb.HEAD_CLASSIFIER,
}
_TOLD: Final = {value: head for head, value in _HEADS.items()}


def worker_head(head: Head) -> wpb.Head.ValueType:
    """A head as routers and workers tell each other."""
    return _HEADS[head]


def told_head(told: wpb.Head.ValueType) -> Head:
    """The head that a worker says; none where this version does not know it."""
    return _TOLD.get(told, NO_HEAD)
