"""Connections to engines: as many as are wanted, and none that closes under a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp

from tq_fs.errors import InvalidConfig

# Of a body, before it is parsed; its socket is read 256 KiB at a time, and no more than that lies
# there too. Larger pieces take as much processor time, and hold up the loop longer (measured with 8
# replies of 3.6 MB at once, from 64 KiB to 4 MiB).
PIECE_BYTES = 64 * 1024
# Less than a server keeps idle connections for (uvicorn: 5 s), so that none closes under a request.
_KEEP_ALIVE_S = 2.0
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


def client_session(headers: Mapping[str, str], connect_s: float) -> aiohttp.ClientSession:
    """Return a session without a limit of connections or a time-out of its own; in a loop.

    Parameters
    ----------
    headers
        Sent with every request.
    connect_s
        Seconds that connecting may take.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        headers={**headers, **_HEADERS},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=PIECE_BYTES,
    )


def checked_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Return base URLs without a slash at their ends, each once.

    Raises
    ------
    InvalidConfig
        None, or one that is no base URL.
    """
    if isinstance(urls, str) or not urls:
        raise InvalidConfig(
            "names no engine", subject="urls", remedy="give a list of base URLs of engines"
        )
    for url in urls:
        if not _is_base(url):
            raise InvalidConfig(
                "is no base URL of an engine", subject=url, remedy="such as http://10.0.0.7:30000"
            )
        if "@" in urlsplit(url).netloc:
            raise InvalidConfig(
                "has a user or password, which would stand in log lines and metrics",
                subject=url.rpartition("@")[2],
                remedy="leave it out, and let what stands before the engine know this host",
            )
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # brackets that do not close, or a port that is none
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
