"""Connections of a client to routers: addresses, TLS, keys and options of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

# A router that comes back is found soon, and one that is gone without a word is noticed.
CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """Routers, and what is shown to them.

    Attributes:
        targets: addresses `HOST:PORT`, or names that gRPC resolves, such as `dns:///NAME:PORT`.
        api_key: shown with every call; "" shows none.
        tls_ca: file of the CA of the routers' certificates; None is plain text.
        client_cert: files of the client's own certificate and key, None for none.
        metadata: sent with every call; `traceparent` goes on with a trace.
    """

    targets: Sequence[str]
    api_key: str = field(default="", repr=False)
    tls_ca: str | Path | None = None
    client_cert: tuple[str | Path, str | Path] | None = None
    metadata: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        """Refuses what can not work.

        Raises:
            ValueError: no address, or a certificate without TLS.
        """
        if not self.targets:
            raise ValueError("targets is empty; give the address of at least one router, as HOST:PORT")
        if self.client_cert is not None and self.tls_ca is None:
            raise ValueError("client_cert is given without tls_ca; a certificate is shown over TLS alone")

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of the channels, None for plain text."""
        if self.tls_ca is None:
            return None
        certificate, key = self.client_cert or (None, None)
        return grpc.ssl_channel_credentials(
            Path(self.tls_ca).read_bytes(),
            None if key is None else Path(key).read_bytes(),
            None if certificate is None else Path(certificate).read_bytes(),
        )

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        key = (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
        return (*key, *self.metadata)
