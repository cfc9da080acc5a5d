"""Servers in processes of their own, which end with the one that started them."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tq_fs.errors import UpstreamRefused, UpstreamUnavailable

_STOP_S = 20.0

# Linux ends the child with us: asked for in the child, and kept by exec.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run a Python program that prints its URL once it serves; give that, and end it afterwards.

    Call it on the main thread: the child ends with the thread that started it.

    Parameters
    ----------
    command
        Arguments of the interpreter.
    log
        Where its standard error goes.

    Raises
    ------
    UpstreamUnavailable
        It ended before it served; with the end of its log.
    """
    guarded = [sys.executable, "-ISc", _GUARD, str(os.getpid()), sys.executable, *command]
    with (
        log.open("ab") as errors,
        subprocess.Popen(guarded, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise UpstreamUnavailable(
                    f"ended before it served:\n{log.read_text()[-2000:]}",
                    subject=" ".join(command),
                )
            yield url
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def post(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    """Send JSON and return the JSON that comes back.

    Raises
    ------
    UpstreamRefused
        The status is another than 200; with what the server said.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        sent = {"Content-Type": "application/json", **headers}
        connection.request("POST", path, json.dumps(body), sent)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise UpstreamRefused(f"{response.status}, {answer.decode()}", subject=f"{url}{path}")
    return json.loads(answer)


def give_weights(engine: str, folder: Path, version: int) -> None:
    """Let the engine read new weights; nothing may be generated meanwhile.

    Raises
    ------
    UpstreamRefused
    """
    body = {"model_path": str(folder), "weight_version": str(version)}
    post(engine, "/update_weights_from_disk", body, {})
