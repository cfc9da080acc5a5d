"""``tq-fs bench channel``: every way, the same bytes, and that they come over the channel."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tq_fs.bench.channel import SIZES, WAYS, Load, ways
from tq_fs.channel import ChannelBackend
from tq_fs.cli import main


def test_it_prints_one_json_object(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "channel", "--repeats", "1", "--root", str(tmp_path), "--json", "-"])
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert code == 0
    assert found.pop("settings")["repeats"] == 1
    endings = ("", "_unix", "_tls", "_local")
    want = {f"{verb}_{size}.x_raw{e}" for verb in ("put", "get") for size in SIZES for e in endings}
    assert set(found) == want
    assert all(value > 0 for value in found.values())
    assert "Read and widen of 8.39 MB" in err
    assert list(tmp_path.iterdir()) == []


def test_every_way_reads_what_was_written_and_clears_what_it_wrote(tmp_path: Path) -> None:
    with ways(tmp_path) as backends:
        load = Load(tmp_path, "0_66mb")
        puts, gets = load.puts(backends), load.gets(backends)
        assert list(puts) == list(gets) == ["raw", *WAYS]
        for name in puts:
            puts[name].run()
            puts[name].after()
            load._out[:] = -1
            gets[name].run()
            load.check()
        load._out[7] += 1
        with pytest.raises(AssertionError):
            load.check()
        for name in ("unix", "tcp", "tls"):
            backend = backends[name]
            assert isinstance(backend, ChannelBackend)
            assert backend.sent_bytes > 32 * SIZES["0_66mb"]
            assert backend.received_bytes == 32 * SIZES["0_66mb"]
        for name in ("local", "unix"):
            assert list(backends[name].list("steps")) == ["get-0_66mb"]
        assert np.count_nonzero(load._data)
