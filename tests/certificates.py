"""Certificates for tests: a CA, and what it signs, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A CA of its own, with its certificate in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        certificate = _builder(self._name, self._name, self._key, days=(-2, 2))
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        signed = certificate.add_extension(constraint, critical=True).sign(self._key, hashes.SHA256())
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *sans: str, days: tuple[int, int] = (-1, 1)) -> Pair:
        """A certificate with these names: IP addresses, URIs or DNS names; valid from now + days[0] to now + days[1].

        Issued again under the same name it replaces the files.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder(_named(name), self._name, key, days)
        if sans:
            names = x509.SubjectAlternativeName([_general_name(san) for san in sans])
            certificate = certificate.add_extension(names, critical=False)
        signed = certificate.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        pair.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return pair


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[int, int]
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
    )


def _general_name(san: str) -> x509.GeneralName:
    if "://" in san:
        return x509.UniformResourceIdentifier(san)
    try:
        return x509.IPAddress(ipaddress.ip_address(san))
    except ValueError:
        return x509.DNSName(san)
