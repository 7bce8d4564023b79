"""Protection of a router: its options of TLS and API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli.core.errors import CommandError
from common.cli.core.options import option
from common.cli.core.tls_options import (
    api_keys_option,
    apply,
    client_tls,
    file_option,
    health_port_option,
    server_tls,
    server_tls_options,
)
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
        """Reads keys and certificates that the parameters of a command with `security_options` name.

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


security_options = apply(
    server_tls_options("FISSILE"),
    file_option(
        "--admin-client-ca", "FISSILE_ADMIN_CLIENT_CA",
        "CAs of the callers of AdminService, PEM. Default: those of --tls-client-ca.",
    ),
    file_option("--worker-ca", "FISSILE_WORKER_CA", "CAs of the workers, PEM; connects to workers with TLS."),
    option(
        "--worker-tls-name", envvar="FISSILE_WORKER_TLS_NAME", default="",
        help="Name that every worker's certificate must have. Default: the host of its address.",
    ),
    file_option(
        "--worker-client-cert", "FISSILE_WORKER_CLIENT_CERT",
        "Certificate chain that the router shows to workers, PEM (mTLS). Read again when it changes.",
    ),
    file_option(
        "--worker-client-key", "FISSILE_WORKER_CLIENT_KEY",
        "Private key of --worker-client-cert, PEM, not encrypted.",
    ),
    api_keys_option,
    option(
        "--api-key-line", "api_key_lines", envvar="FISSILE_API_KEY_LINES", multiple=True, metavar="LINE",
        help="One line of an --api-keys file. Repeat it, or separate several by spaces in the variable.",
    ),
    health_port_option("FISSILE"),
)  # fmt: skip


def _access(file: Path | None, lines: tuple[str, ...]) -> KeyAccess | None:
    if file is None and not lines:
        return None
    try:
        return KeyAccess(KeyStore(file, lines))
    except KeyFileError as error:
        raise CommandError(str(error)) from None
