"""What a reference means: versioned JSON documents, their checks, and the catalog of a store."""

from tq_fs.manifests._catalog import MANIFEST, TRAJECTORY, Catalog, Entry, Found, fetch
from tq_fs.manifests._check import check_manifest, check_segment
from tq_fs.manifests._page import PAGE_SCHEMA, Noted, decode_page, encode_page, note, noted
from tq_fs.manifests._pages import PAGES, Pages
from tq_fs.manifests._seal import seal, unseal
from tq_fs.manifests._decoded import DecodedManifest, DecodedManifests, Resolved
from tq_fs.manifests._models import (
    MANIFEST_SCHEMA,
    SCHEMAS,
    STATE_SCHEMA,
    STORE_SCHEMA,
    TOMBSTONE_SCHEMA,
    Fragment,
    Mode,
    SegmentEntry,
    SessionManifest,
    SessionState,
    StoreDocument,
    TombstoneDocument,
    View,
    decode,
    encode,
    json_schema,
)

__all__ = [
    "MANIFEST",
    "MANIFEST_SCHEMA",
    "PAGES",
    "PAGE_SCHEMA",
    "Noted",
    "Pages",
    "decode_page",
    "encode_page",
    "note",
    "noted",
    "seal",
    "unseal",
    "SCHEMAS",
    "STATE_SCHEMA",
    "STORE_SCHEMA",
    "TOMBSTONE_SCHEMA",
    "TRAJECTORY",
    "Catalog",
    "DecodedManifest",
    "DecodedManifests",
    "Entry",
    "Found",
    "Fragment",
    "Mode",
    "Resolved",
    "SegmentEntry",
    "SessionManifest",
    "SessionState",
    "StoreDocument",
    "TombstoneDocument",
    "View",
    "check_manifest",
    "check_segment",
    "decode",
    "encode",
    "fetch",
    "json_schema",
]
