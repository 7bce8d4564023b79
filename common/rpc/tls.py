"""TLS on every hop: certificates from files that are read again when they change.

A server checks its files at each handshake (gRPC asks in its own threads, never on the event loop), a client at each
dial. Invariant: files that cannot be used, such as a half-written pair, change nothing: the certificate read before
stays in use, and each such state of the files is logged once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import grpc
import structlog

from common.files import UnreadableFileError, read_file
from common.limits import MAX_PEM_BYTES

log = structlog.get_logger(__name__)

# State of each file: inode, size and time of its last change; None for a missing file.
_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>.+)\]|(?P<host>[^:]+))(?::\d+)?")
_ENCRYPTED_KEYS_HAVE_NO_PASSWORD: Final = b""


class TlsError(Exception):
    """Certificate files that cannot be used; one line that names the file and the problem."""


@dataclass(frozen=True, slots=True)
class _Pem:
    """Contents of the files; None for files that are not configured."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class _Files:
    """Certificate, key and CAs as last read."""

    def __init__(self, cert: Path | None, key: Path | None, ca: Path | None) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self._paths = [path for path in (cert, key, ca) if path is not None]
        self._lock = threading.Lock()
        self._seen = self._state()
        self.pem = self._read()

    def refresh(self) -> bool:
        """Reads changed files again; True if `pem` is new."""
        with self._lock:
            # Taken before reading, so that a change during the reading is seen at the next check.
            state = self._state()
            if state == self._seen:
                return False
            self._seen = state
            try:
                pem = self._read()
            except TlsError as error:
                log.warning("certificate not reloaded, the previous one stays in use", why=str(error))
                return False
            changed, self.pem = pem != self.pem, pem
            if changed:
                log.info("certificate reloaded", files=[str(path) for path in self._paths])
            return changed

    def _state(self) -> _State:
        return tuple(_state_of(path) for path in self._paths)

    def _read(self) -> _Pem:
        pem = self._contents()
        if self._ca is not None and pem.ca is not None:
            _check_ca(self._ca, pem.ca)
        if self._cert is not None and self._key is not None:
            _check_pair(self._cert, self._key)
            # gRPC's check has read the files itself, maybe after another change.
            if self._contents() != pem:
                raise TlsError(f"{self._cert} changes while it is read")
        return pem

    def _contents(self) -> _Pem:
        return _Pem(*(None if path is None else _content(path) for path in (self._cert, self._key, self._ca)))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _content(path: Path) -> bytes:
    try:
        return read_file(path, MAX_PEM_BYTES)
    except UnreadableFileError as error:
        raise TlsError(str(error)) from None


def _check_ca(path: Path, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{path} holds no CA certificates in PEM form") from None


def _check_pair(cert: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, lambda: _ENCRYPTED_KEYS_HAVE_NO_PASSWORD)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise TlsError(
            f"{cert} and {key} are not a certificate chain and its unencrypted key, in PEM form ({reason})"
        ) from None


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server.

    Attributes:
        cert: certificate chain, the server's own first.
        key: its private key, not encrypted.
        client_ca: CAs of the callers, who must then show a certificate of one of them; None asks callers for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port; they follow changes of the files.

        Raises:
            TlsError: the files cannot be used now.
        """
        files = _Files(self.cert, self.key, self.client_ca)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            return _configuration(files.pem) if files.refresh() else None

        # None means "no change", which the library's type stubs do not allow.
        follow = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
        return grpc.dynamic_ssl_server_credentials(_configuration(files.pem), follow, self.client_ca is not None)

    def ssl_context(self) -> ssl.SSLContext:
        """Context for a server that is not gRPC's; each handshake follows changes of the files.

        Raises:
            TlsError: the files cannot be used now.
        """
        files = _Files(self.cert, self.key, self.client_ca)
        current = self._loaded(files.pem)

        def follow(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            nonlocal current
            if files.refresh():
                with contextlib.suppress(OSError, ValueError):
                    current = self._loaded(files.pem)
                    current.sni_callback = follow
            connection.context = current

        current.sni_callback = follow
        return current

    def _loaded(self, pem: _Pem) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key, lambda: _ENCRYPTED_KEYS_HAVE_NO_PASSWORD)
        if pem.ca is not None:
            context.load_verify_locations(cadata=pem.ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key or b"", pem.cert or b"")], pem.ca)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client.

    Attributes:
        ca: CAs of the server; None uses gRPC's public ones.
        cert: certificate chain to show; None shows none.
        key: its private key, not encrypted.
        name: name that the server's certificate must have; "" uses the dialled host.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    name: str = ""


class Dialer:
    """Opens channels to servers of one kind; in plain text without `tls`.

    Args:
        tls: the client's files, checked at every `channel`.

    Raises:
        TlsError: the files cannot be used now.
    """

    def __init__(self, tls: ClientTls | None = None) -> None:
        self.tls = tls
        self._files = None if tls is None else _Files(tls.cert, tls.key, tls.ca)

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel to `address`, never through a proxy of the environment."""
        options = [("grpc.enable_http_proxy", 0), *options]
        if self.tls is None or self._files is None:
            return grpc.aio.insecure_channel(address, options=options)
        self._files.refresh()
        pem = self._files.pem
        if self.tls.name:
            options.append(("grpc.ssl_target_name_override", self.tls.name))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert), options)


def is_loopback(address: str) -> bool:
    """True if only processes of this machine reach `address`, a host or host:port (IPv6 in brackets with a port)."""
    match = _ADDRESS.fullmatch(address)
    host = address if match is None else match["v6"] or match["host"]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
