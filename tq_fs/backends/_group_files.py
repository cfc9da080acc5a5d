"""A group that is to be uploaded, and its files: in memory one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tq_fs.backends._base import Buffer
from tq_fs.backends._local import LocalBackend
from tq_fs.budget import ByteBudget
from tq_fs.errors import TqFsError
from tq_fs.memory import mapped_empty


@dataclass(slots=True, eq=False)
class Upload:
    """A group that waits for its upload.

    Attributes
    ----------
    place
        Where the group lies, and will lie.
    sizes
        Its members' sizes [bytes].
    fresh
        Nothing of any group lay at its prefix before.
    begun
        Something of it may have been uploaded.
    cancelled
        It is to be removed: who uploads it stops.
    done
        It was uploaded, or cancelled.
    tries
        How often it failed.
    failed_at
        Which failure of the queue its last one was, counted from 1.
    due
        When it may be tried again [monotonic seconds].
    error
        Of the last try.
    """

    place: str
    sizes: Mapping[str, int]
    fresh: bool = False
    begun: bool = False
    cancelled: bool = False
    done: bool = False
    tries: int = 0
    failed_at: int = 0
    due: float = 0.0
    error: TqFsError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its members."""
        return sum(self.sizes.values())


class UploadCancelled(Exception):
    """The group is to be removed."""


class GroupFiles(Mapping[str, list[Buffer]]):
    """The members of a group on a local disk; used by one thread, as a context manager.

    A member is read when it is asked for, and goes when the next one is: so much memory is taken
    from a budget that all who upload share, and given back to the system. A member larger than the
    budget takes all of it.

    Raises
    ------
    UploadCancelled
        On asking for a member.
    ObjectMissing, ObjectShort
        The file is gone, or was cut.
    """

    def __init__(
        self, local: LocalBackend, upload: Upload, memory: ByteBudget, at: Callable[[str], None]
    ) -> None:
        self._local = local
        self._upload = upload
        self._memory = memory
        self._at = at
        self._data: list[Buffer] = []
        self._taken = 0

    def __getitem__(self, name: str) -> list[Buffer]:
        """Return a member's bytes; they are gone when the next one is asked for."""
        size = self._upload.sizes[name]
        self._let_go()
        if self._upload.cancelled:
            raise UploadCancelled
        self._take(size)
        self._data = [mapped_empty(size)]
        with self._local.open(f"{self._upload.place}/{name}") as file:
            file.readinto(self._data, 0)
        self._at("uploading")
        return self._data

    def __iter__(self) -> Iterator[str]:
        """Yield the members' names."""
        return iter(self._upload.sizes)

    def __len__(self) -> int:
        """Return how many members there are."""
        return len(self._upload.sizes)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is such a member, without reading it."""
        return name in self._upload.sizes

    def __enter__(self) -> GroupFiles:
        """Return the files."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go of what is in memory."""
        self._let_go()

    def _take(self, size: int) -> None:
        part = min(size, self._memory.limit_bytes)
        self._memory.acquire(part)
        self._taken = part

    def _let_go(self) -> None:
        self._data.clear()  # who was given the list may still have it
        self._memory.release(self._taken)
        self._taken = 0
