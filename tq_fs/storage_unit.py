"""StorageUnit: takes Steps, encodes them and puts them on its node's disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from tq_fs.backends import Backend
from tq_fs.keys import StepKey
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, StepEntry, encode_step


class StorageUnit:
    """Writes and deletes the Steps of one store on one backend. Safe to call from many threads.

    Parameters
    ----------
    backend
        Where Steps go; stays the caller's.
    store_id
        The store the unit serves.
    name
        The unit's name in manifests.
    options
        How Steps are encoded.
    """

    def __init__(
        self, backend: Backend, store_id: str, *, name: str = "local", options: EncodeOptions
    ) -> None:
        self.backend = backend
        self.name = name
        self._store_id = store_id
        self._options = options
        self._local = threading.local()

    def put(self, key: StepKey, tokens: int, arrays: Sequence[FieldArray]) -> StepEntry:
        """Encode a Step and publish it; returns when it is as durable as the policy says.

        Parameters
        ----------
        key
            The Step.
        tokens
            Tokens it recorded.
        arrays
            Its fields; not changed, and not needed afterwards.

        Returns
        -------
        StepEntry
            What a manifest says of it.

        Raises
        ------
        ValueOutOfRange, ObjectExists, StorageFull
            Nothing is visible, or the other content is unchanged.
        """
        scratch = self._scratch()
        try:
            encoded = encode_step(self._store_id, key, tokens, arrays, self._options, scratch)
            self.backend.publish(key.path, encoded.members)
        finally:
            scratch.reset()
        return msgspec.structs.replace(encoded.entry, unit=self.name)

    def clear(self, key: StepKey) -> bool:
        """Remove a Step; idempotent. Returns whether it was there."""
        return self.backend.delete(key.path)

    def clear_incarnation(self, incarnation_path: str) -> bool:
        """Remove all Steps of an incarnation; idempotent."""
        return self.backend.delete(f"steps/{incarnation_path}")

    def steps(self, incarnation_path: str) -> list[int]:
        """Return the indexes of the Steps an incarnation has on this unit."""
        names = self.backend.list(f"steps/{incarnation_path}")
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def incarnations(self) -> list[str]:
        """Return the paths of all incarnations that have Steps on this unit."""
        backend = self.backend
        return [
            f"{partition}/{session}/{incarnation}"
            for partition in backend.list("steps")
            for session in backend.list(f"steps/{partition}")
            for incarnation in backend.list(f"steps/{partition}/{session}")
        ]

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        return scratch
