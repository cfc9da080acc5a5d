"""The example configurations open real stores, and tell the real defaults."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import tq_fs
from tests._clusters import STORE, cluster
from tests._rollouts import assert_batch, record, specs, standard_fields
from tq_fs import ClusterConfig, StoreConfig, TierConfig
from tq_fs.backends._s3 import OPTIONS as KNOWN_OPTIONS
from tq_fs.channel import Identity
from tq_fs.cluster._settings import settings_of
from tq_fs.embedded import reader_threads, writer_threads

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
NAMES = ("local-nvme", "s3", "minio", "tiered", "ray-cluster")
FIELDS = standard_fields()
LINE = re.compile(r"^(?P<indent> *)(?P<key>[a-z_]+):(?P<rest>.*)$")
# A value, perhaps with a unit; then what counts where the value is none or auto.
SAID = re.compile(
    r"default: (?P<value>[^\s,]+?)(?: (?P<unit>MiB|GiB))?(?:, which is (?P<here>\w+)(?: here)?)?"
    r"[.,]?(?:\s|$)"
)
UNITS = {None: 1, "MiB": 2**20, "GiB": 2**30}
OPTIONS = {
    *("endpoint_url", "region", "addressing_style", "unsigned_payload"),
    *("profile", "key", "secret"),
}


def commented(name: str) -> dict[str, str]:
    """Return each key's comment, dotted where it stands below another."""
    found, above = {}, ""
    for line in (CONFIGS / f"{name}.yaml").read_text().splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        if not match["indent"]:
            above = match["key"]
        key = match["key"] if not match["indent"] else f"{above}.{match['key']}"
        found[key] = match["rest"].partition("  # ")[2]
    return found


def default_of(key: str) -> Any:
    above, _, name = key.rpartition(".")
    kind: Any = {"tier": TierConfig, "cluster": ClusterConfig}.get(above, StoreConfig)
    (field,) = [f for f in dataclasses.fields(kind) if f.name == name]
    return list(field.default) if isinstance(field.default, tuple) else field.default


@pytest.mark.parametrize("name", NAMES)
def test_an_example_configuration_is_valid(name: str) -> None:
    config = StoreConfig.from_yaml(CONFIGS / f"{name}.yaml")
    assert (config.url is None) == (name == "ray-cluster")
    assert (config.tier is not None) == (name == "tiered")
    assert (config.cluster is not None) == (name == "ray-cluster")
    assert pickle.loads(pickle.dumps(config)) == config  # a literal secret would not travel


@pytest.mark.parametrize("name", NAMES)
def test_every_key_tells_its_default(name: str) -> None:
    for key, comment in commented(name).items():
        if key == "tier.folder":
            assert comment.startswith("no default. ")
            continue
        assert comment.startswith("default: "), key
        if key.startswith("storage_options") or key in ("tier", "url", "cluster"):
            continue
        said = SAID.match(comment)
        assert said is not None, key
        want = default_of(key)
        if want is None:
            assert said["value"] in ("none", "all"), key
        else:
            assert yaml.safe_load(said["value"]) * UNITS[said["unit"]] == want, key
        assert key not in (chosen := chosen_by(name)) or said["here"] == chosen[key], key


def chosen_by(name: str) -> dict[str, str]:
    """Return what is chosen by the kind of store where nothing is said, in the comments' words."""
    local = name == "local-nvme"
    threads = {
        "reader_threads": str(reader_threads(StoreConfig(), remote=not local)),
        "writer_threads": str(writer_threads(StoreConfig(), remote=not local)),
    }
    return threads | {
        "layout": "full" if local else "compact",
        "persist_trajectories": "off" if local else "on",
    }


def test_every_key_stands_in_an_example() -> None:
    told = {key for name in NAMES for key in commented(name)}
    want = {f.name for f in dataclasses.fields(StoreConfig)}
    want |= {f"tier.{f.name}" for f in dataclasses.fields(TierConfig)}
    want |= {f"cluster.{f.name}" for f in dataclasses.fields(ClusterConfig)}
    want |= {f"storage_options.{name}" for name in OPTIONS}
    assert told == want
    assert set(KNOWN_OPTIONS) >= OPTIONS


@pytest.mark.parametrize(
    "name",
    ["local-nvme", *(pytest.param(n, marks=pytest.mark.s3) for n in ("s3", "minio", "tiered"))],
)
def test_an_example_configuration_opens_a_store(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    if name == "local-nvme":
        values["url"] = tmp_path.as_uri()
    else:
        values["url"] = f"s3://{request.getfixturevalue('bucket')}/tq-fs"
    if name == "tiered":
        values["tier"]["folder"] = str(tmp_path / "front")
    config = StoreConfig.of(values)
    assert config.url is not None
    with tq_fs.open_store(config.url, fields=specs(FIELDS), config=config) as store:
        segments, want = record(store, "a", 1)
        assert_batch(store.hydrate(segments), want)
        assert len(list(store.unreleased())) == len(segments)


def test_the_example_of_a_cluster_makes_units(tmp_path: Path) -> None:
    values = yaml.safe_load((CONFIGS / "ray-cluster.yaml").read_text())
    config = settings_of(CONFIGS / "ray-cluster.yaml")
    assert config.cluster is not None
    assert config.cluster.folders("a") == ("/mnt/nvme/tq-fs",)
    settings = values["cluster"] | {"paths": (str(tmp_path / "{node}"),), "host": "127.0.0.1"}
    identity = Identity.new(STORE)
    with (
        cluster(tmp_path, 2, cluster=settings, identity=identity) as made,
        made.store(specs(FIELDS)) as store,
    ):
        segments, want = record(store, "a", 1)
        assert_batch(store.hydrate(segments), want)
