"""Writes the engine's newest steps to files: when the engine fails, and when a step takes too long.

A dump is a file of JSON lines, a `fissile.worker.v1.Step` each, oldest first. It has ids of requests and numbers of
tokens, no texts and no tokens. A folder that cannot be written costs one warning a dump, and nothing else: a thread
writes, and the worker waits for it only for a bounded time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.json_format import MessageToDict

from common.limits import MAX_DUMPED_STEP_ROWS, MAX_STEP_DUMPS, STEP_DUMP_WAIT_S, STEP_WATCH_S
from worker.engine.step_record import StepRecord, StepRing
from worker.session.engine_loop import EngineLoop, EngineState
from worker.session.step_protos import newest_steps, step_proto

log = structlog.get_logger(__name__)

# Reasons of a dump, which are part of its name.
FAILED: Final = "failed"
STALLED: Final = "stalled"


def hanging_step(steps: StepRing, now: float, limit_s: float) -> StepRecord | None:
    """The oldest step in flight, if it was launched more than `limit_s` seconds before `now`."""
    oldest = next((record for record in steps.newest() if record.finished is None), None)
    return oldest if oldest is not None and now - oldest.launched > limit_s else None


def write_dump(folder: Path, worker_id: str, reason: str, steps: list[wpb.Step], unix_s: float) -> Path:
    """Writes a dump, readable by its owner alone, and removes the worker's oldest ones beyond MAX_STEP_DUMPS.

    Args:
        folder: made if it is missing.
        worker_id: of the worker; part of the name.
        reason: FAILED or STALLED.
        steps: oldest first.
        unix_s: Unix time.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    folder.mkdir(exist_ok=True)
    prefix = f"steps-{re.sub(r'[^A-Za-z0-9_.-]', '_', worker_id)}-"
    place = folder / f"{prefix}{datetime.fromtimestamp(unix_s, UTC):%Y%m%dT%H%M%S.%f}-{reason}.jsonl"
    # Only a whole dump gets the name of one.
    part = place.with_suffix(".part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            for step in steps:
                file.write(json.dumps(MessageToDict(step, preserving_proto_field_name=True), ensure_ascii=False) + "\n")
        part.rename(place)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    for old in sorted(folder.glob(f"{prefix}*.jsonl"))[:-MAX_STEP_DUMPS]:
        old.unlink(missing_ok=True)
    return place


class StepDumps:
    """Dumps of one worker.

    Args:
        folder: of the files; None writes none.
        stall_s: a step counts as hanging after this time, seconds.
        clock: monotonic seconds.

    Attributes:
        worker_id: part of the names of files.
    """

    def __init__(self, folder: Path | None, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker_id = ""
        self._folder = folder
        self._stall_s = stall_s
        self._clock = clock

    async def write(self, ring: StepRing, reason: str) -> None:
        """Writes a dump if there are steps and a folder. Waits at most STEP_DUMP_WAIT_S for it. Never fails."""
        if self._folder is None or not ring.newest(1):
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                self._write(ring, reason)
            finally:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(done.set)

        try:
            # A daemon: a file system that hangs must not keep the process from ending.
            threading.Thread(target=run, name="step dump", daemon=True).start()
        except RuntimeError as error:
            # The machine gives no more threads.
            log.warning("steps not dumped", folder=str(self._folder), error=str(error))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_DUMP_WAIT_S):
                await done.wait()

    async def watch(self, engine: EngineLoop) -> None:
        """Writes a dump for each step that hangs, until cancelled."""
        dumped: StepRecord | None = None
        while self._folder is not None:
            await asyncio.sleep(STEP_WATCH_S)
            if engine.state is not EngineState.RUNNING:
                continue
            record = hanging_step(engine.steps, self._clock(), self._stall_s)
            if record is not None and record is not dumped:
                dumped = record
                log.warning("step hangs", step=record.number, seqs=len(record.seq_ids), prefills=record.num_prefills)
                await self.write(engine.steps, STALLED)

    def _write(self, ring: StepRing, reason: str) -> None:
        assert self._folder is not None
        now = self._clock()
        records = newest_steps(ring, wpb.ListStepsRequest(), MAX_DUMPED_STEP_ROWS)
        try:
            steps = [step_proto(each, now, ring.unix_offset_s) for each in records]
            place = write_dump(self._folder, self.worker_id, reason, steps, time.time())
        except Exception as error:
            # Observation must not fail what is observed.
            log.warning("steps not dumped", folder=str(self._folder), error=str(error))
        else:
            log.warning("steps dumped", path=str(place), steps=len(records), reason=reason)
