"""Where a unit listens: ``unix:/folder/socket`` on its own host, else ``tcp:host:port``."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tq_fs.errors import InvalidConfig

_MOST_PATH = 107  # sun_path


@dataclass(frozen=True, slots=True)
class Unix:
    """A socket in a folder."""

    path: str


@dataclass(frozen=True, slots=True)
class Tcp:
    """A port of a host."""

    host: str
    port: int


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """Listen at an endpoint, and return its name; of port 0, with the port that was free.

    Raises
    ------
    InvalidConfig
        It is none, or cannot be used.
    """
    where = parse(endpoint)
    try:
        if isinstance(where, Unix):
            return _listen_unix(where), endpoint
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        sock = socket.create_server((where.host, where.port), family=family, backlog=128)
    except OSError as error:
        raise InvalidConfig(
            f"cannot be listened at: {error}", subject=endpoint, remedy="choose another endpoint"
        ) from error
    host = f"[{where.host}]" if ":" in where.host else where.host
    return sock, f"tcp:{host}:{sock.getsockname()[1]}"


def _listen_unix(where: Unix) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(sock, where.path)
        os.chmod(where.path, 0o600)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(sock: socket.socket, path: str) -> None:
    """Bind to a path, also where a process that was killed has left its socket."""
    try:
        sock.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_dead(path):
            raise
        os.unlink(path)
        sock.bind(path)


def _is_dead(path: str) -> bool:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def connect(endpoint: str, timeout_s: float) -> socket.socket:
    """Return a connection to an endpoint.

    Raises
    ------
    InvalidConfig
        It is none.
    OSError
        Nobody answers there.
    """
    where = parse(endpoint)
    if isinstance(where, Tcp):
        return socket.create_connection((where.host, where.port), timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(where.path)
    except BaseException:
        sock.close()
        raise
    return sock


def parse(endpoint: str) -> Unix | Tcp:
    """Return what an endpoint says.

    Raises
    ------
    InvalidConfig
    """
    kind, _, rest = endpoint.partition(":")
    if kind == "unix" and rest.startswith("/"):
        if len(rest.encode()) > _MOST_PATH:
            raise InvalidConfig(
                f"is longer than {_MOST_PATH} bytes", subject=endpoint, remedy="use a shorter path"
            )
        return Unix(rest)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return Tcp(host.strip("[]"), int(port))
    raise InvalidConfig(
        "is no endpoint", subject=repr(endpoint), remedy="unix:/folder/socket or tcp:host:port"
    )


def private_socket(name: str) -> Path:
    """Return a short path for a socket, by the name of what listens, in a folder of the own user.

    Raises
    ------
    InvalidConfig
        Others may enter the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"tq-fs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidConfig(
            "is not this user's alone", subject=str(folder), remedy="remove it, or set TMPDIR"
        )
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.sock"
