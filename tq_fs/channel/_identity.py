"""Who may speak to a unit beyond its own host: a certificate of the store, for mutual TLS.

All units and clients of a store have the same certificate, made when the store's cluster starts,
and trust it alone. Whoever has its key may read and write the store.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tq_fs.channel._cipher import load, missing
from tq_fs.errors import InvalidConfig

_YEARS = timedelta(days=3650)
_BEGIN = b"-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Identity:
    """A store's certificate and its key, in PEM. The key is not shown.

    Attributes
    ----------
    certificate, key
        PEM.
    """

    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def new(cls, store_id: str) -> Identity:
        """Make a key and a certificate for it.

        Raises
        ------
        DependencyMissing
            `cryptography` is not installed.
        """
        try:
            from cryptography import x509  # noqa: PLC0415  # optional
            from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        except ImportError as error:
            raise missing("cryptography is not installed") from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"tq-fs {store_id}"[:64])])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # clocks of nodes differ
            .not_valid_after(now + _YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        kind = serialization.PrivateFormat.PKCS8
        return cls(
            certificate.public_bytes(pem),
            key.private_bytes(pem, kind, serialization.NoEncryption()),
        )

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read a file that :meth:`save` wrote.

        Raises
        ------
        InvalidConfig
            It cannot be read, or holds something else.
        """
        try:
            key, found, certificate = Path(path).read_bytes().partition(_BEGIN)
        except OSError as error:
            raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
        if b"PRIVATE KEY" not in key or not found:
            raise InvalidConfig(
                "holds no key and certificate", subject=str(path), remedy="see tq-fs serve --help"
            )
        return cls(found + certificate, key)

    def save(self, path: str | Path) -> None:
        """Write both into a new file that only its owner may read.

        Raises
        ------
        InvalidConfig
            There is one, or it cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(self.key + self.certificate)
        except OSError as error:
            raise InvalidConfig(f"cannot be written: {error}", subject=str(path)) from error

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of a connection's end, which speaks to its like only.

        Raises
        ------
        DependencyMissing
            What seals the frames behind the handshake is not installed.
        """
        load()  # now, and not with the first connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # units are known by the certificate, wherever they are
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate.decode())
        if server:
            context.num_tickets = 0  # nothing comes over TLS but what the handshake says
        fd = os.memfd_create("tq-fs")  # OpenSSL takes files only, and this one is on no disk
        try:
            os.write(fd, self.key + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context
