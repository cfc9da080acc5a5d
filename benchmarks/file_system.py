"""What a file system takes for the parts of a Step: ``python benchmarks/file_system.py``.

Two tables: single operations, and one large write with source and file offset aligned to each
other or not. On a journaled loop mount where that is permitted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tq_fs.bench._disk import measuring_place
from tq_fs.memory import aligned_empty

REPEATS = 200
CHUNKS, CHUNK_BYTES = 16, 327_680
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY
_JSON = b"x" * 700


def median_us(call: Callable[[int], object], repeats: int = REPEATS) -> float:
    """Return the median microseconds of a call, given its number."""
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def operations(root: Path) -> dict[str, float]:
    """Time what making one Step consists of."""
    fds: dict[int, int] = {}

    def create(i: int) -> None:
        fds[i] = os.open(root / f"a{i}" / "file", _CREATE, 0o644)

    (root / "b").mkdir()
    return {
        "make a directory": median_us(lambda i: os.mkdir(root / f"a{i}")),
        "create a file": median_us(create),
        "write 700 bytes": median_us(lambda i: os.write(fds[i], _JSON)),
        "close it": median_us(lambda i: os.close(fds[i])),
        "rename the directory": median_us(lambda i: os.rename(root / f"a{i}", root / f"b/a{i}")),
        "open and close a file": median_us(
            lambda i: os.close(os.open(root / f"b/a{i}/file", os.O_RDONLY))
        ),
    }


def copies(root: Path) -> dict[str, float]:
    """Time one write of 5 MB in 16 chunks, by how source and file offset agree."""
    memory = aligned_empty(CHUNKS * (CHUNK_BYTES + 64) + 64)
    memory[:] = 7
    apart = CHUNK_BYTES + 64

    def chunks(shift: int, gap: bytes) -> list[object]:
        starts = [i * apart + shift for i in range(CHUNKS)]
        return [b for s in starts for b in (memory[s : s + CHUNK_BYTES], gap) if len(b)]

    ways = {
        "aligned to each other": chunks(0, b""),
        "source 16 bytes off (an ordinary numpy array)": chunks(16, b""),
        "4 bytes of checksum between chunks": chunks(0, bytes(4)),
        "4 bytes of checksum and 60 of gap": chunks(0, bytes(64)),
    }
    return {name: _write(root, buffers) for name, buffers in ways.items()}


def _write(root: Path, buffers: Sequence[object]) -> float:
    def write(i: int) -> None:
        fd = os.open(root / f"w{i}", _CREATE, 0o644)
        os.writev(fd, buffers)  # type: ignore[arg-type]
        os.close(fd)

    median_us(write, 20)  # touches the pages that the next round is given again
    _remove(root)
    result = median_us(write, 20)
    _remove(root)
    return result


def _remove(root: Path) -> None:
    for path in root.glob("w*"):
        path.unlink()


def main() -> None:
    """Print both tables."""
    console = Console()
    with measuring_place(None, 2 * 1024**3) as place:
        for title, rows in (
            (f"One operation, on {place.kind}", operations(place.folder)),
            ("One write of 5.2 MB", copies(place.folder)),
        ):
            table = Table(title=title, title_justify="left")
            table.add_column("")
            table.add_column("us", justify="right")
            for name, value in rows.items():
                table.add_row(name, f"{value:.1f}")
            console.print(table)


if __name__ == "__main__":
    main()
