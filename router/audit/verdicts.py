"""Carries out the verdicts of audits: keeps the proof that a worker was wrong, and takes the worker out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path

import grpc
import structlog
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.protobuf import json_format

from common.limits import CONNECT_TIMEOUT_S
from common.rpc.tls import Dialer
from router.audit.decide import Wrong
from router.requests.running import RunningRequests

log = structlog.get_logger(__name__)


class Verdicts:
    """Keeps proofs and cordons workers.

    Args:
        folder: folder for the proofs; None keeps none.
        running: knows the workers.
        dialer: opens channels to workers.
    """

    def __init__(self, folder: Path | None, running: RunningRequests, dialer: Dialer) -> None:
        self._folder = folder
        self._running = running
        self._dialer = dialer

    @property
    def keeps(self) -> bool:
        """True if proofs are kept."""
        return self._folder is not None

    async def write(self, name: str, proof: pb.ReplayRequest) -> str:
        """Writes a proof, with which `fissile verify` finds the difference again. Returns the file, "" for none."""
        if self._folder is None:
            return ""
        path = self._folder / f"{name}.json"
        text = json_format.MessageToJson(proof, preserving_proto_field_name=True, indent=1)
        try:
            await asyncio.to_thread(_write_private, path, text + "\n")
        except OSError as error:
            log.error("audit: the answer cannot be written", file=str(path), why=error.strerror)
            return ""
        return str(path)

    async def take_out(self, wrong: Wrong, identity: str, numerics: str) -> None:
        """Cordons a worker, unless it is the last one of its model and numerics class.

        If the worker is certainly wrong, its running requests move to other workers.
        """
        addresses = self._running.workers_of(identity, numerics)
        address = addresses.get(wrong.worker_id)
        if address is None or len(addresses) < 2:
            log.error(
                "audit: the worker is not cordoned: it is gone, or nobody else is there", worker_id=wrong.worker_id
            )
            return
        intake = wpb.INTAKE_EVICTING if wrong.is_certain else wpb.INTAKE_CORDONED
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self._dialer.channel(address) as channel:
                wanted = wpb.SetIntakeRequest(intake=intake)
                await WorkerServiceStub(channel).SetIntake(wanted, timeout=CONNECT_TIMEOUT_S)
                log.error("audit: worker cordoned", worker_id=wrong.worker_id, evicted=wrong.is_certain)


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read, since it has a client's prompt. Replaces a file or link."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
