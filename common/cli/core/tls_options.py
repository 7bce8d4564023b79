"""The options of TLS and keys that several commands have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from common.cli.core.client import Credentials
from common.cli.core.errors import CommandError
from common.cli.core.options import option
from common.rpc.tls import ClientTls, ServerTls

_FILE = click.Path(path_type=Path)
_Command = Callable[..., Any]


def apply(*decorators: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Several decorators as one; their options stand in this order in the help."""
    return lambda command: functools.reduce(lambda wrapped, add: add(wrapped), reversed(decorators), command)


def file_option(name: str, envvar: str, help: str) -> Callable[[_Command], _Command]:
    """An option that is a path of a file, absent by default."""
    return option(name, envvar=envvar, default=None, type=_FILE, metavar="FILE", help=help)


def server_tls_options(prefix: str) -> Callable[[_Command], _Command]:
    """`--tls-cert`, `--tls-key` and `--tls-client-ca`, by environment variables that begin with `prefix`."""
    return apply(
        file_option(
            "--tls-cert", f"{prefix}_TLS_CERT",
            "Certificate chain of this server, PEM; callers must then use TLS. Read again when it changes.",
        ),
        file_option("--tls-key", f"{prefix}_TLS_KEY", "Private key of --tls-cert, PEM, not encrypted."),
        file_option(
            "--tls-client-ca", f"{prefix}_TLS_CLIENT_CA",
            "CAs of the callers, PEM; each caller must show a certificate of one of them (mTLS). Default: no "
            "certificate is asked for.",
        ),
    )  # fmt: skip


api_keys_option = file_option(
    "--api-keys", "FISSILE_API_KEYS",
    "API keys, hashed: a line each, as `fissile keys new` prints it. Every call but health then needs a key. Read "
    "again when it changes.",
)  # fmt: skip


def health_port_option(prefix: str) -> Callable[[_Command], _Command]:
    """`--health-port`."""
    return option(
        "--health-port", envvar=f"{prefix}_HEALTH_PORT", default=None, type=click.IntRange(0, 65535),
        help="Further port that serves health alone, in plain text, for probes without TLS such as those of "
        "Kubernetes; 0 takes any free one. Default: off.",
    )  # fmt: skip


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """The files of a server's port; None is plain text.

    Raises:
        CommandError: one of them is missing.
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
    """The files of a client; None is plain text.

    Args:
        ca: CAs of the server.
        cert: certificate to show.
        key: its key.
        name: name that the server's certificate must have.
        prefix: what the names of the two options of the certificate begin with.
        wanted: TLS with the public CAs when there is no `ca`.

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


_CLIENT_TLS_OPTIONS = apply(
    option(
        "--tls/--no-tls", envvar="FISSILE_TLS", default=None,
        help="Connect with TLS, trusting the public CAs unless --tls-ca names others, or in plain text. Default: TLS "
        "with --tls-ca, else plain text.",
    ),
    file_option("--tls-ca", "FISSILE_TLS_CA", "CAs of the server, PEM; connects with TLS."),
    option(
        "--tls-name", envvar="FISSILE_TLS_NAME", default="",
        help="Name in the server's certificate. Default: the host of its address.",
    ),
    file_option("--client-cert", "FISSILE_CLIENT_CERT", "Certificate chain to show to the server, PEM (mTLS)."),
    file_option("--client-key", "FISSILE_CLIENT_KEY", "Private key of --client-cert, PEM, not encrypted."),
)  # fmt: skip
_API_KEY_OPTION = option(
    "--api-key", envvar="FISSILE_API_KEY", default="", metavar="KEY",
    help="API key for the router. Better set by the variable: other users of this machine can see command lines.",
)  # fmt: skip


def with_tls(command: _Command) -> _Command:
    """Adds a client's options of TLS, and hands them to the command as `tls`.

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

    return _CLIENT_TLS_OPTIONS(wrapped)


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
    """Adds a client's options of TLS and `--api-key`, and hands them to the command as `credentials`."""

    @functools.wraps(command)
    def wrapped(*args: Any, tls: ClientTls | None, api_key: str, **kwargs: Any) -> Any:
        return command(*args, credentials=Credentials(tls, api_key), **kwargs)

    return with_tls(_API_KEY_OPTION(wrapped))
