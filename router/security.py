"""Protection of a router: its options of TLS and API keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


_OPTIONS = apply(
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


def with_security(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, and hands them to the command as `security`.

    Raises (the command):
        CommandError: something is missing.
    """

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_client_ca: Path | None,
        admin_client_ca: Path | None,
        worker_ca: Path | None,
        worker_tls_name: str,
        worker_client_cert: Path | None,
        worker_client_key: Path | None,
        api_keys: Path | None,
        api_key_lines: tuple[str, ...],
        health_port: int | None,
        **kwargs: Any,
    ) -> Any:
        tls = server_tls(tls_cert, tls_key, tls_client_ca)
        if admin_client_ca is not None and tls is None:
            raise CommandError("--admin-client-ca needs --tls-cert and --tls-key")
        security = RouterSecurity(
            tls=tls,
            admin_tls=server_tls(tls_cert, tls_key, admin_client_ca or tls_client_ca),
            worker_tls=client_tls(
                ca=worker_ca,
                cert=worker_client_cert,
                key=worker_client_key,
                name=worker_tls_name,
                prefix="--worker-",
            ),
            access=_access(api_keys, api_key_lines),
            health_port=health_port,
        )
        return command(*args, security=security, **kwargs)

    return _OPTIONS(wrapped)


def _access(file: Path | None, lines: tuple[str, ...]) -> KeyAccess | None:
    if file is None and not lines:
        return None
    try:
        return KeyAccess(KeyStore(file, lines))
    except KeyFileError as error:
        raise CommandError(str(error)) from None
