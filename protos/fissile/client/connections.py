"""Connections of a client to routers: addresses, TLS, keys and options of channels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from fissile.client.arguments import Metadata
from fissile.client.messages import SentMetadata

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):\d{1,5}")
# A name that gRPC resolves, such as dns:///NAME:PORT.
_NAME = re.compile(r"[a-z][a-z0-9+.-]*:.+")

# Valid names of metadata, valid values under names that are not binary, and names reserved by gRPC or HTTP/2.
_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
_TAKEN = re.compile(r"grpc-.*|te|content-type|host|connection|transfer-encoding")

# A router that comes back is found quickly, a router that vanishes is noticed, and calls to a name of several routers
# alternate among those that answer.
_CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """Addresses of routers, and the credentials shown to them.

    Examples:
        ```python
        with Client("10.0.0.1:50051", tls_ca="ca.pem", api_key="fsl_...") as client:
            print(client.connection.targets)
        ```

    Attributes:
        targets: addresses `HOST:PORT`, or names that gRPC resolves, such as `dns:///NAME:PORT`; a name may stand for
            several routers.
        api_key: sent with every call; "" for none. In plain text anybody on the network path can read it.
        tls: True connects with TLS, and trusts the public CAs without a `tls_ca`.
        tls_ca: file of the CAs of the routers' certificates, PEM; connects with TLS.
        tls_name: name that the routers' certificates must have; "" for the host of the address.
        client_cert: files of the client's own certificate and key, None for none.
        metadata: sent with every call.
        options: further arguments of gRPC channels.
        waits_when_full: False raises the refusal of routers whose queue is full as soon as each of them has refused;
            True calls again when they say.
    """

    targets: Sequence[str]
    api_key: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str | Path | None = None
    tls_name: str = ""
    client_cert: tuple[str | Path, str | Path] | None = None
    metadata: Metadata = ()
    options: Sequence[tuple[str, Any]] = ()
    waits_when_full: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot work.

        Raises:
            ValueError: an address is missing or invalid, a key or metadata cannot be sent, or an option needs TLS.
        """
        if not isinstance(self.targets, list | tuple) or not all(isinstance(each, str) for each in self.targets):
            raise ValueError(f"targets is {self.targets!r}; give the addresses of routers as texts, HOST:PORT")
        if not self.targets or not all(self.targets):
            raise ValueError("targets is empty; give the address of at least one router, as HOST:PORT")
        if odd := next((target for target in self.targets if not is_target(target)), None):
            raise ValueError(f"{odd!r} is not an address; give HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")
        sendable(self.metadata)
        if not is_key(self.api_key):
            raise ValueError("api_key has a character that no key has, such as the line break at the end of a file")
        if not self.tls and self.tls_ca is None and (self.client_cert is not None or self.tls_name):
            name = "tls_name" if self.client_cert is None else "client_cert"
            raise ValueError(f"{name} is given without TLS; set tls_ca, or tls=True for the public CAs")

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of the channels, None for plain text. Files are read now.

        Raises:
            OSError: a file cannot be read.
        """
        if not self.tls and self.tls_ca is None:
            return None
        certificate, key = self.client_cert or (None, None)
        return grpc.ssl_channel_credentials(_read(self.tls_ca), _read(key), _read(certificate))

    @property
    def channel_options(self) -> list[tuple[str, Any]]:
        """Arguments of the channels."""
        name = [("grpc.ssl_target_name_override", self.tls_name)] if self.tls_name else []
        return [*_CHANNEL_OPTIONS, *name, *self.options]

    def metadata_of(self, call: Metadata = ()) -> SentMetadata:
        """All metadata to send with a call: the API key, the connection's metadata, and `call`.

        An `authorization` of the call replaces the API key.

        Raises:
            ValueError: a pair cannot be sent.
        """
        own = sendable(call)
        has_own_key = not self.api_key or any(name == "authorization" for name, _ in own)
        key = () if has_own_key else (("authorization", f"Bearer {self.api_key}"),)
        return (*key, *sendable(self.metadata), *own)


def is_target(text: str) -> bool:
    """True if `text` is an address with its port, without which gRPC would take 443, or a name that gRPC resolves."""
    return bool(_ADDRESS.fullmatch(text) or _NAME.fullmatch(text))


def sendable(metadata: Metadata) -> SentMetadata:
    """Checks metadata, and converts it to the pairs that gRPC takes.

    gRPC itself would report a wrong pair in its log alone, and fail the call with a status that looks like a router's.

    Raises:
        ValueError: a pair cannot be sent, or would arrive changed.
    """
    pairs = [*metadata.items()] if isinstance(metadata, Mapping) else metadata
    if isinstance(pairs, str | bytes) or not hasattr(pairs, "__iter__"):
        raise ValueError(f"metadata is {metadata!r}; give pairs of a name and a value")
    return tuple(_sendable_pair(f"metadata[{i}]", pair) for i, pair in enumerate(pairs))


def _sendable_pair(path: str, pair: Any) -> tuple[str, str | bytes]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError(f"{path} is {pair!r}; give a name and a value")
    name, value = pair
    if not isinstance(name, str) or not _METADATA_NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        wanted = "lower-case letters, digits, '-', '_' and '.', and no name of gRPC's own, such as grpc-timeout or te"
        raise ValueError(f"{path} has the name {name!r}, which cannot be sent; names have {wanted}")
    if name.endswith("-bin"):
        if not isinstance(value, bytes):
            raise ValueError(f"{path}, {name}, has the value {value!r}; names that end with -bin have bytes")
    elif not isinstance(value, str) or not _METADATA_VALUE.fullmatch(value):
        wanted = "texts of printable ASCII without a blank at either end, and names that end with -bin have any bytes"
        raise ValueError(f"{path}, {name}, has the value {value!r}, which cannot be sent; values are {wanted}")
    return name, value


def is_key(text: str) -> bool:
    """True if metadata can hold `text` as a key, as it is; also of "", no key."""
    return isinstance(text, str) and text.isascii() and text.isprintable() and text == text.strip()


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
