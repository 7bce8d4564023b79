"""TLS and API keys of a router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli.core.errors import CommandError
from common.cli.core.tls_options import client_tls, server_tls
from common.rpc.api_keys import KeyFileError
from common.rpc.auth import Access, KeyAccess
from common.rpc.key_store import KeyStore
from common.rpc.tls import ClientTls, ServerTls


@dataclass(frozen=True, slots=True)
class RouterSecurity:
    """Protection that one router is started with; nothing by default.

    Attributes:
        tls: of the public port; None is plain text.
        admin_tls: of AdminService's port.
        worker_tls: for calls of workers.
        access: decides about the calls of both ports; None admits all.
        health_port: of health in plain text; 0 takes any, None is off.
    """

    tls: ServerTls | None = None
    admin_tls: ServerTls | None = None
    worker_tls: ClientTls | None = None
    access: Access | None = None
    health_port: int | None = None

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any]) -> RouterSecurity:
        """Reads the keys and certificates that the options of `fissile router` name.

        Raises:
            CommandError: something is missing.
        """
        cert, key, client_ca = given["tls_cert"], given["tls_key"], given["tls_client_ca"]
        tls = server_tls(cert, key, client_ca)
        if given["admin_client_ca"] is not None and tls is None:
            raise CommandError("--admin-client-ca needs --tls-cert and --tls-key")
        worker_tls = client_tls(
            ca=given["worker_ca"],
            cert=given["worker_client_cert"],
            key=given["worker_client_key"],
            name=given["worker_tls_name"],
            prefix="--worker-",
        )
        return cls(
            tls=tls,
            admin_tls=server_tls(cert, key, given["admin_client_ca"] or client_ca),
            worker_tls=worker_tls,
            access=_access(given["api_keys"], given["api_key_lines"]),
            health_port=given["health_port"],
        )


def _access(file: Path | None, lines: tuple[str, ...]) -> KeyAccess | None:
    if file is None and not lines:
        return None
    try:
        return KeyAccess(KeyStore(file, lines))
    except KeyFileError as error:
        raise CommandError(str(error)) from None
