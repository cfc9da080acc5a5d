"""Which TransferQueue this works with: one that was read and tested, and no other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tq_fs.errors import DependencyMissing

WANTED = "0.1.11"
_REMEDY = f"pip install 'tq-fs[transfer-queue]' 'TransferQueue=={WANTED}'"


def check_version() -> None:
    """Refuse another version than the one that this was written for.

    Raises
    ------
    DependencyMissing
    """
    try:
        found = version("TransferQueue")
    except PackageNotFoundError as error:
        raise DependencyMissing("TransferQueue is not installed", remedy=_REMEDY) from error
    if found != WANTED:
        raise DependencyMissing(
            f"is version {found}, this backend is for {WANTED}: between versions its internals "
            "change without notice",
            subject="TransferQueue",
            remedy=_REMEDY,
        )


check_version()
