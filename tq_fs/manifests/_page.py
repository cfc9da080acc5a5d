"""A page: many manifests in one file, with what a start needs to know without decoding them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from tq_fs.errors import ManifestCorrupt
from tq_fs.keys import Incarnation
from tq_fs.manifests._models import SessionManifest, decode, encode
from tq_fs.manifests._seal import seal, unseal
from tq_fs.steps import check_schema

PAGE_SCHEMA = "tq-fs/page/1"
_LEVEL = 1  # a fifth of the JSON, in 27 µs; level 6 takes twice as long for a tenth


class Noted(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A manifest as a page holds it, and as a Controller keeps it in memory.

    Attributes
    ----------
    partition, session_id, incarnation_id, consumers
        As in the manifest.
    stamp
        Of the file it was read from or written to; empty where the backend gives none.
    segments, steps, nbytes
        Its Segments, the Steps they refer to, and stored bytes of those.
    packed
        The manifest itself: deflated JSON, sealed as in its file.
    """

    partition: str
    session_id: str
    incarnation_id: str
    stamp: str
    consumers: tuple[str, ...]
    segments: int
    steps: int
    nbytes: int
    packed: bytes

    @property
    def incarnation(self) -> Incarnation:
        """The session incarnation."""
        return Incarnation(self.partition, self.session_id, self.incarnation_id)

    def json(self) -> bytes:
        """Return the manifest as its file holds it.

        Raises
        ------
        ManifestCorrupt
        """
        try:
            return zlib.decompress(self.packed)
        except zlib.error as error:
            subject = f"packed manifest of {self.incarnation}"
            raise ManifestCorrupt(f"cannot be read: {error}", subject=subject) from error


    def manifest(self) -> SessionManifest:
        """Return the manifest.

        Raises
        ------
        ManifestCorrupt
        """
        return decode(self.json(), SessionManifest, str(self.incarnation))


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    store_id: str
    epoch: int
    entries: tuple[msgspec.Raw, ...]


class _Head(msgspec.Struct):
    schema: str


_decode_noted = msgspec.msgpack.Decoder(Noted).decode
_encode = msgspec.msgpack.Encoder().encode


def note(manifest: SessionManifest, data: bytes | None = None, stamp: str = "") -> bytes:
    """Return a :class:`Noted` as bytes; `data` is the manifest's file, where that is at hand."""
    needed = {f.step for s in manifest.segments for fs in s.fields.values() for f in fs}
    steps = [step for step in manifest.steps if step.index in needed]
    noted = Noted(
        partition=manifest.partition,
        session_id=manifest.session_id,
        incarnation_id=manifest.incarnation_id,
        stamp=stamp,
        consumers=manifest.consumers,
        segments=len(manifest.segments),
        steps=len(steps),
        nbytes=sum(step.nbytes for step in steps),
        packed=zlib.compress(data or encode(manifest), _LEVEL),
    )
    return _encode(noted)


def noted(data: bytes) -> Noted:
    """Undo :func:`note`."""
    return _decode_noted(data)


def encode_page(store_id: str, epoch: int, entries: Sequence[bytes]) -> bytes:
    """Return entries as one sealed document."""
    raw = tuple(map(msgspec.Raw, entries))
    page = _Page(schema=PAGE_SCHEMA, store_id=store_id, epoch=epoch, entries=raw)
    return seal(_encode(page))


def decode_page(data: bytes, store_id: str, subject: str) -> list[bytes]:
    """Return a page's entries, once all of them can be read.

    Raises
    ------
    FormatTooNew
        Written by a later version.
    ManifestCorrupt
        It is damaged, no page, or another store's.
    """
    body = unseal(data, subject)
    try:
        check_schema(msgspec.msgpack.decode(body, type=_Head).schema, PAGE_SCHEMA, subject)
        page = msgspec.msgpack.decode(body, type=_Page)
        entries = [bytes(raw) for raw in page.entries]
        for entry in entries:
            _decode_noted(entry)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(f"cannot be read: {error}", subject=subject) from error
    if page.store_id != store_id:
        raise ManifestCorrupt(f"is of store {page.store_id!r}, not {store_id!r}", subject=subject)
    return entries
