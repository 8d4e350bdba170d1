"""Keys and certificates: what a server and its nodes know each other by."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.errors import DataError, SettingError
from sartor.files import write
from sartor.settings import shown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def check_issued(certificate: Path, authority: Path) -> None:
    """Refuse a server's certificate that nodes with this authority's would not accept."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    found = []
    for path in (certificate, authority):
        try:
            found.append(x509.load_pem_x509_certificate(path.read_bytes()))
        except OSError as error:
            raise SettingError(f"--tls: {path}: cannot be read: {error.strerror or error}") from None
        except ValueError:
            raise SettingError(f"--tls: {path}: no certificate in PEM form") from None
    try:
        found[0].verify_directly_issued_by(found[1])
    except (ValueError, TypeError, InvalidSignature):
        raise SettingError(
            f"--tls: {certificate} was not issued by {authority}; nodes would refuse the server"
        ) from None


def check_pair(certificate: Path, key: Path) -> None:
    """Refuse a key that is not the one of the server's certificate; one with a password is not tried."""
    asked: list[bool] = []

    def password() -> bytes:
        asked.append(True)
        return b""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except ssl.SSLError:
        if not asked:
            raise SettingError(f"--tls: {key}: is not the key of {certificate}") from None
    except OSError as error:
        raise SettingError(f"--tls: {key}: cannot be read: {error.strerror or error}") from None


LONGEST_SUBJECT = 64
"""Characters that the subject of a certificate may have; its other names may be longer."""
CLIENT = "client:"
"""What a line begins with that names a client which the key below it may bring."""


def make_keys(
    folder: Path,
    hosts: list[str],
    nodes: list[str],
    clients: Mapping[str, Sequence[str]] | None = None,
    days: int = 825,
) -> list[Path]:
    """Keys for a federation: an authority, the server's certificate by it, and a key for every node.

    ``clients`` are those that a node may bring; one that is not among them may bring any that no other may.
    Nothing that exists is written over.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    folder.mkdir(parents=True, exist_ok=True)
    names = ["ca.crt", "server.crt", "server.key", "nodes.pub", *(f"{node}.key" for node in nodes)]
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise SettingError(f"{folder / taken[0]}: exists already; give another folder")
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, key: Any, issuer: str, by: Any, authority: bool) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
            subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(days=days),
        )
        builder = builder.add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        signs = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        usage |= {"encipher_only": False, "decipher_only": False}
        usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
        return builder.add_extension(signs, False).add_extension(x509.KeyUsage(**usage), True)

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = certificate("sartor federation", authority, "sartor federation", authority, True)
    subject = hosts[0] if len(hosts[0]) <= LONGEST_SUBJECT else "sartor server"
    leaf = certificate(subject, server, "sartor federation", authority, False)
    leaf = leaf.add_extension(alternatives, False)
    made = {
        "ca.crt": (root.sign(authority, hashes.SHA256()), 0o644),
        "server.crt": (leaf.sign(authority, hashes.SHA256()), 0o644),
    }
    for name, (signed, mode) in made.items():
        write(folder / name, signed.public_bytes(_pem()), mode)
    write(folder / "server.key", _private(server), 0o600)
    public = b""
    for node in nodes:
        key = ec.generate_private_key(ec.SECP384R1())  # the curve of Flower's nodes
        write(folder / f"{node}.key", _private(key), 0o600)
        brings = (clients or {}).get(node, ())
        public += "".join(f"{CLIENT} {name}\n" for name in brings).encode() + public_key(key)
    write(folder / "nodes.pub", public)
    return [folder / name for name in names]


def _alternative(host: str) -> Any:
    """A name or an address for a certificate; nodes would not know the server by anything else."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_])?", host):
            return x509.DNSName(host)
    raise SettingError(f"--host: expected a name or an address, as fl.example.org, got {shown(host)}")


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """A node's private key, PEM or OpenSSH."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    try:
        data = path.read_bytes()
        read = load_ssh_private_key if b"OPENSSH" in data[:60] else load_pem_private_key
        key = read(data, None)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path}: no private key of a node; `sartor keys` makes them")
    return key


def read_public_keys(path: Path) -> dict[bytes, tuple[str, ...]]:
    """The public keys of the nodes that may join, each with the clients that it may bring; none: any.

    They stand one after the other in a file, in PEM form, each below the lines that name its clients.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    end = b"-----END PUBLIC KEY-----"
    try:
        blocks = [block.strip() for block in path.read_bytes().split(end) if block.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    keys: dict[bytes, tuple[str, ...]] = {}
    for place, block in enumerate(blocks, 1):
        above, begin, rest = block.partition(b"-----BEGIN")
        try:
            key = load_pem_public_key(begin + rest + b"\n" + end)
            lines = [line.strip() for line in above.decode().splitlines() if line.strip()]
        except ValueError:
            raise DataError(f"{path}: entry {place} is no public key") from None
        wrong = [line for line in lines if not line.startswith((CLIENT, "#"))]
        if wrong:
            raise DataError(
                f"{path}: entry {place}: expected '{CLIENT} NAME' above a key, got {shown(wrong[0])}"
            )
        names = tuple(line[len(CLIENT) :].strip() for line in lines if line.startswith(CLIENT))
        public = key.public_bytes(_pem(), _subject())
        if public in keys:
            raise DataError(
                f"{path}: entry {place} has the key of another; name all of its clients above one"
            )
        keys[public] = names
    if not keys:
        raise DataError(f"{path}: holds no public key; `sartor keys` writes such a file")
    return keys


def fingerprint(key: bytes) -> str:
    """A short name of a public key (PEM), which no other has."""
    return hashlib.sha256(key).hexdigest()[:32]


def own_key(path: Path) -> EllipticCurvePrivateKey:
    """The key of a node that was not given one: its own, made once."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.exists():
        write(path, _private(ec.generate_private_key(ec.SECP384R1())), 0o600)
    return read_key(path)


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _subject() -> Any:
    from cryptography.hazmat.primitives.serialization import PublicFormat

    return PublicFormat.SubjectPublicKeyInfo


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    return bytes(key.private_bytes(_pem(), PrivateFormat.PKCS8, NoEncryption()))


def public_key(key: EllipticCurvePrivateKey) -> bytes:
    """The public half of a node's key, PEM."""
    return bytes(key.public_key().public_bytes(_pem(), _subject()))
