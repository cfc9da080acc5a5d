"""The other process of ``tq-fs bench channel``: a unit, until its input ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tq_fs.backends import LocalBackend
from tq_fs.channel import ChannelServer, Identity

STORE = "bench"
UNIT = "unit"
IDENTITY = "identity.pem"


def main(folder: Path) -> None:
    """Serve, and print how to get here."""
    identity = Identity.load(folder / IDENTITY)
    backend = LocalBackend(folder / "unit")
    plain = ChannelServer(
        backend,
        store_id=STORE,
        unit=UNIT,
        local=[f"unix:{folder}/socket"],
        remote=["tcp:127.0.0.1:0"],
    )
    tls = ChannelServer(
        backend, store_id=STORE, unit=UNIT, remote=["tcp:127.0.0.1:0"], identity=identity
    )
    unix, tcp = plain.endpoints
    said = {"unix": unix, "tcp": tcp, "tls": tls.endpoints[0]}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for server in (plain, tls):
        server.close()
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
