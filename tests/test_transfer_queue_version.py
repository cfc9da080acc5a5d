"""What somebody is told who has another TransferQueue than the one that the backend is for."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable

import pytest

from tq_fs.errors import DependencyMissing

MODULE = "tq_fs.integrations.transfer_queue"


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (lambda _: "0.1.12", r"TransferQueue: is version 0\.1\.12, this backend is for 0\.1\.11"),
        (absent, "TransferQueue is not installed"),
    ],
    ids=["another", "none"],
)
def test_importing_the_backend_with_another_transfer_queue_says_what_to_install(
    version: Callable[[str], str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n == MODULE or n.startswith(f"{MODULE}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(DependencyMissing, match=rf"{message}.*TransferQueue==0\.1\.11"):
        importlib.import_module(MODULE)
