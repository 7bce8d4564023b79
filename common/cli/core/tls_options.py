"""TLS files and API keys from the options of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from common.cli.core.client import Credentials
from common.cli.core.errors import CommandError
from common.rpc.tls import ClientTls, ServerTls

_Command = Callable[..., Any]


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """Makes the TLS of a server's port; None is plain text.

    Raises:
        CommandError: the certificate or the key is missing.
    """
    if cert is not None and key is not None:
        return ServerTls(cert, key, client_ca)
    if cert is None and key is None and client_ca is None:
        return None
    raise CommandError(
        f"{'--tls-cert' if cert is None else '--tls-key'} is missing: TLS needs --tls-cert and --tls-key"
    )


def client_tls(
    *, ca: Path | None, cert: Path | None, key: Path | None, name: str, prefix: str = "--", wanted: bool = False
) -> ClientTls | None:
    """Makes the TLS of a client; None is plain text.

    Args:
        ca: CAs of the server.
        cert: certificate to show.
        key: its key.
        name: name that the server's certificate must have.
        prefix: begin of the names of the options for certificate and key.
        wanted: True for TLS with the public CAs if `ca` is None.

    Raises:
        CommandError: something is missing.
    """
    if (cert is None) != (key is None):
        missing = "client-cert" if cert is None else "client-key"
        raise CommandError(f"{prefix}{missing} is missing: a certificate is shown with its key")
    if ca is not None or wanted:
        return ClientTls(ca, cert, key, name)
    if cert is not None or name:
        raise CommandError(f"{prefix}{'client-cert' if cert else 'tls-name'} needs TLS: name the server's CAs too")
    return None


def with_tls(command: _Command) -> _Command:
    """Hands a command its TLS options as one argument, `tls`.

    Raises (the command):
        CommandError: something is missing.
    """

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        tls: bool | None,
        tls_ca: Path | None,
        tls_name: str,
        client_cert: Path | None,
        client_key: Path | None,
        **kwargs: Any,
    ) -> Any:
        if tls is False:
            # Credentials of the environment may be meant for other calls, so only the command line's are refused.
            _refuse_credentials_without_tls()
            return command(*args, tls=None, **kwargs)
        files = client_tls(ca=tls_ca, cert=client_cert, key=client_key, name=tls_name, wanted=bool(tls))
        return command(*args, tls=files, **kwargs)

    return wrapped


def _refuse_credentials_without_tls() -> None:
    """Refuses TLS credentials of the command line if `--no-tls` or the environment turns TLS off.

    Raises:
        CommandError: the command line has a TLS credential.
    """
    context = click.get_current_context()
    for name in ("tls_ca", "tls_name", "client_cert", "client_key"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise CommandError(
                f"--{name.replace('_', '-')} has no effect with --no-tls or FISSILE_TLS=0: leave one of them out"
            )


def with_credentials(command: _Command) -> _Command:
    """Hands a command its TLS options and `--api-key` as one argument, `credentials`."""

    @functools.wraps(command)
    def wrapped(*args: Any, tls: ClientTls | None, api_key: str, **kwargs: Any) -> Any:
        return command(*args, credentials=Credentials(tls, api_key), **kwargs)

    return with_tls(wrapped)
