"""Conversion of a checkpoint's head between Python and the protos of router and worker."""

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
    """The proto value of a head."""
    return _HEADS[head]


def told_head(told: wpb.Head.ValueType) -> Head:
    """The head of a proto value; NO_HEAD for a value that this version does not know."""
    return _TOLD.get(told, NO_HEAD)
