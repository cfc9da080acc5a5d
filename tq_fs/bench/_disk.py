"""A journaled file system to measure on: a loop mount of our own, where we may make one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tq_fs.backends import mapped


class Place(NamedTuple):
    """Where measurements are made.

    Attributes
    ----------
    folder
        An empty folder.
    kind
        What it lies on, in words.
    """

    folder: Path
    kind: str


@contextmanager
def measuring_place(root: Path | None, nbytes: int) -> Iterator[Place]:
    """Give an empty folder and remove it afterwards.

    Parameters
    ----------
    root
        Folder to make it in, as it is. None: on a journaled ext4 in a file, mounted for the
        purpose, or, where mounting is not permitted, in the system's folder for temporary files.
    nbytes
        Size of that file system.
    """
    if root is not None:
        with mapped(str(root)):
            root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tq-fs-bench-", dir=root) as folder:
            yield Place(Path(folder), f"folder {root}")
        return
    with tempfile.TemporaryDirectory(prefix="tq-fs-bench-") as folder:
        mount = _mount(Path(folder), nbytes)
        if mount is None:
            yield Place(Path(folder), "the temporary folder (a loop mount is not permitted here)")
            return
        try:
            yield Place(mount, "journaled ext4 on a loop mount")
        finally:
            subprocess.run(["umount", str(mount)], check=True)


def _mount(folder: Path, nbytes: int) -> Path | None:
    """Mount a new ext4 below `folder`; None where the tools or the rights are missing."""
    if shutil.which("mkfs.ext4") is None or shutil.which("mount") is None:
        return None
    image, point = folder / "image", folder / "mount"
    with image.open("wb") as file:
        file.truncate(nbytes)
    point.mkdir()
    for command in (
        ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image)],
        ["mount", "-o", "loop", str(image), str(point)],
    ):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            image.unlink()
            return None
    return point
