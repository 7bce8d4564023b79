"""Heads and poolings of checkpoints, and their values in the protos."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.params.pooling import LABELS, LAST, MEAN, Pooling

# An output head gives logits of tokens, a classifier gives scores of labels. Without a head the states are the
# result.
Head: TypeAlias = Literal["output", "none", "classifier"]
OUTPUT_HEAD: Final = "output"
NO_HEAD: Final = "none"
CLASSIFIER: Final = "classifier"

_PUBLIC: Final[dict[Pooling | None, pb.Pooling.ValueType]] = {
    None: pb.POOLING_UNSPECIFIED,
    LAST: pb.POOLING_LAST,
    MEAN: pb.POOLING_MEAN,
}
_OF_WORKERS: Final[dict[Pooling | None, wpb.Pooling.ValueType]] = {
    None: wpb.POOLING_UNSPECIFIED,
    LAST: wpb.POOLING_LAST,
    MEAN: wpb.POOLING_MEAN,
    LABELS: wpb.POOLING_LABELS,
}
_FROM_PUBLIC: Final = {value: pooling for pooling, value in _PUBLIC.items()}
_FROM_WORKERS: Final = {value: pooling for pooling, value in _OF_WORKERS.items()}


def public_pooling(pooling: Pooling | None) -> pb.Pooling.ValueType:
    """The public proto value of a pooling."""
    return _PUBLIC[pooling]


def pooling_of(given: pb.Pooling.ValueType) -> Pooling | None:
    """The pooling that a client asks for; None if it leaves the choice to the model.

    Raises:
        KeyError: the value is unknown.
    """
    return _FROM_PUBLIC[given]


def worker_pooling(pooling: Pooling | None) -> wpb.Pooling.ValueType:
    """The proto value of a pooling between router and worker."""
    return _OF_WORKERS[pooling]


def told_pooling(told: wpb.Pooling.ValueType) -> Pooling | None:
    """The pooling of a proto value between router and worker; None for none, or one that this version does not know."""
    return _FROM_WORKERS.get(told)


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
