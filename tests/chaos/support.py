"""What chaos tests share: the memory and files of a process, and clients that read as they like."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.e2e.service import Process

T = TypeVar("T", bound=Message)

# A reader with a small window: otherwise gRPC itself takes megabytes before the router's write blocks.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def rss_mib(process: Process) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{process.running.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def log_entries(process: Process) -> list[dict[str, Any]]:
    """What a process has logged in whole lines, without lines that are none of its own (gRPC writes some)."""
    lines = process.log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def open_files(process: Process) -> int:
    """Number of file descriptors of a process."""
    return len(list(Path(f"/proc/{process.running.pid}/fd").iterdir()))


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def until(condition: Callable[[], object], within_s: float = 60.0, what: str = "condition") -> None:
    """Waits for a condition; fails when it does not come."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"{what} not reached within {within_s} s"
        time.sleep(0.02)


@contextlib.contextmanager
def client_of(process: Process, options: Sequence[tuple[str, int]] = ()) -> Iterator[InferenceServiceStub]:
    """A client with a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1), *options]
    with grpc.insecure_channel(process.address, options=own) as channel:
        yield InferenceServiceStub(channel)


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The code of a call's status."""
    assert isinstance(error, grpc.Call)
    return error.code()


def detail(error: grpc.RpcError, kind: type[T]) -> T | None:
    """A detail of a call's status; None when it has none of this kind."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    found = kind()
    if status is None or not any(packed.Unpack(found) for packed in status.details):
        return None
    return found


def reason_of(error: grpc.RpcError) -> str:
    """The reason in the status's ErrorInfo; "" when there is none."""
    info = detail(error, error_details_pb2.ErrorInfo)
    return "" if info is None else str(info.reason)
