"""A TCP proxy between a router and a worker that can stop forwarding, be slow, or break its connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator


class Proxy:
    """Forwards bytes on a thread of its own.

    Attributes:
        port: where it listens.
        delay_s: seconds for which it keeps what it has read.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self.port = 0
        self.delay_s = delay_s
        self._target_port = target_port
        self._forwards = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)

    def stop(self) -> None:
        self.break_connections()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def black_hole(self) -> None:
        """Accepts and keeps connections, and forwards nothing."""
        self._call(self._forwards.clear)

    def forward(self) -> None:
        self._call(self._forwards.set)

    def break_connections(self) -> None:
        """Resets every connection; new ones are taken."""
        self._call(self._abort)

    def _call(self, change: Callable[[], None]) -> None:
        async def on_the_loop() -> None:
            change()

        asyncio.run_coroutine_threadsafe(on_the_loop(), self._loop).result(60)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _listen(self) -> None:
        self._forwards.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers |= {writer, far_writer}
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._forwards.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.contextmanager
def proxied(target_port: int) -> Iterator[Proxy]:
    proxy = Proxy(target_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
