"""TransferQueue with its values on disk: the same program, and only its configuration differs.

Three kinds of processes put, get, list and clear: the driver, an actor on Ray, and a process of its
own that joins later. One import and the configuration, both in the driver, make tq-fs the backend;
the others have never heard of it. What is printed is the same with both backends.

    pip install 'tq-fs[transfer-queue]'
    python examples/03_transfer_queue.py --backend SimpleStorage
    python examples/03_transfer_queue.py --backend TqFs
    python examples/03_transfer_queue.py --backend TqFs --url s3://bucket/prefix --address auto
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

PARTITION = "train"
LAYERS, TOPK, EXPERTS = 40, 8, 128
LENGTHS = (2048, 700, 33)  # tokens of the samples that each process puts

# ---------------------------------------------------------------- the program


def work(name: str) -> list[str]:
    """Put samples, get them and those of others, and clear one; return what happened, in words."""
    keys = [f"{name}-{number}" for number in range(len(LENGTHS))]
    samples = [sample(key, tokens) for key, tokens in zip(keys, LENGTHS, strict=True)]
    tq.kv_put(keys[0], PARTITION, samples[0], tag={"by": name, "reward": 0.5})
    tq.kv_batch_put(keys[1:], PARTITION, batch(samples[1:]), tags=[{"by": name, "reward": 1.0}] * 2)
    said = [f"put {keys}"]
    there = sorted(tq.kv_list(PARTITION)[PARTITION])
    found = tq.kv_batch_get(there, PARTITION)
    said += [f"got {key}: {told(found, at)}" for at, key in enumerate(there)]
    tq.kv_clear(keys[0], PARTITION)
    left = tq.kv_list(PARTITION)[PARTITION]
    said.append(f"left: {[f'{key} {left[key]}' for key in sorted(left)]}")
    return said


def sample(key: str, tokens: int) -> dict[str, Any]:
    """Make up what a rollout of so many tokens leaves; the same for each key."""
    engine = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return {
        "tokens": torch.randint(32_000, (tokens,), generator=engine),
        "logprobs": -torch.rand(tokens, generator=engine),
        "routed_experts": torch.randint(
            EXPERTS, (tokens, LAYERS, TOPK), generator=engine, dtype=torch.uint8
        ),
        "messages": [{"role": "user", "content": f"question {key}"}],
    }


def batch(samples: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Return samples as a batch: tensors nested, for their lengths differ."""
    columns: dict[str, Any] = {}
    for field, first in samples[0].items():
        values = [one[field] for one in samples]
        if isinstance(first, torch.Tensor):
            columns[field] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        else:
            columns[field] = NonTensorStack(*values)
    return TensorDict(columns, batch_size=len(samples))


def told(found: TensorDict, at: int) -> str:
    """Say what a sample's fields are: types, shapes and a digest of the bytes."""
    parts = []
    for field in sorted(found.keys()):
        value = found[field][at]
        if isinstance(value, torch.Tensor):
            digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12]
            parts.append(f"{field} {value.dtype} {list(value.shape)} {digest}")
        else:
            parts.append(f"{field} {getattr(value, 'data', value)!r}")
    return ", ".join(parts)


@ray.remote(num_cpus=0)
class Actor:
    """A process of Ray's."""

    def work(self) -> list[str]:
        """Do as the others do."""
        tq.init()
        return work("actor")


# ---------------------------------------------------------------- its start


def configuration(backend: str, url: str) -> dict[str, Any]:
    """Return what the queue is started with; here, and here only, the backends differ."""
    if backend == "TqFs":
        import tq_fs.integrations.transfer_queue  # noqa: F401, PLC0415  # registers it

        own: dict[str, Any] = {"url": url, "store_id": "example"}
    else:
        own = {"num_data_storage_units": 2}
    return {"backend": {"storage_backend": backend, backend: own}}


def lead(backend: str, url: str) -> None:
    """Start the queue, and work in three kinds of processes."""
    tq.init(OmegaConf.create(configuration(backend, url)))
    try:
        show("the driver", work("driver"))
        show("an actor", ray.get(Actor.remote().work.remote()))
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, __file__, "--join", address]
        joined = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        print(joined.stdout, end="")
        show("the driver again", work("driver"))
    finally:
        tq.close()


def show(who: str, said: Sequence[str]) -> None:
    """Print what a process did."""
    print(f"{who}:", *said, sep="\n    ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, and do as it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("SimpleStorage", "TqFs"), default="TqFs")
    parser.add_argument("--url", help="where TqFs stores (default: a folder that is removed)")
    parser.add_argument("--address", default="local", help="of a Ray cluster (default: a new one)")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    with cluster(asked.join or asked.address):
        if asked.join:
            tq.init()
            show("a plain process", work("plain"))
        else:
            with tempfile.TemporaryDirectory(prefix="tq-fs-") as folder:
                lead(asked.backend, asked.url or f"file://{folder}")
    return 0


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Join a Ray cluster, or start one of this machine."""
    own: dict[str, Any] = {"num_cpus": 8, "include_dashboard": False} if address == "local" else {}
    ray.init(address=address, log_to_driver=False, **own)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
