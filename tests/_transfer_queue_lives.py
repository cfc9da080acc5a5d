"""Runs of a TransferQueue that end by SIGKILL, and what the next one must find.

    python -m tests._transfer_queue_lives first|again PLACE ROOT CHECKPOINT

`first` puts values and saves a checkpoint; `again` loads it and compares. Both then overwrite,
clear and put what the checkpoint does not know, say so, and wait to be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

import tq_fs.integrations.transfer_queue  # noqa: F401  # registers the backend
from tests._transfer_queue_places import Place, configuration, raylets

PARTITION = "train"
KEYS = [f"sample-{number}" for number in range(12)]
CLEARED, REPLACED = KEYS[:3], KEYS[3:6]
READY = "ready to be killed"


def fields(key: str, version: int) -> dict[str, Any]:
    """Return a sample's values, which are others in each version; also NaNs with payloads."""
    random = np.random.default_rng([KEYS.index(key), version])
    tokens = 1000 + int(random.integers(0, 200))
    bits = random.integers(0, 2**32, tokens, dtype=np.uint32)
    return {
        "tokens": torch.from_numpy(random.integers(0, 2**31, tokens)),
        "logprobs": torch.from_numpy(bits.view(np.float32)),
        "routed_experts": torch.from_numpy(
            random.integers(0, 256, (tokens, 40, 8), dtype=np.uint8)
        ),
        "halves": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16),
        "few": torch.tensor([version, 2.5]),
        "scalar": torch.tensor(version),
        "array": random.random((3, 5)),
        "text": f"the answer {version} to {key}, and an ünïcode one",
        "turns": [{"role": "user", "content": key, "n": [1, 2, None, version]}, "end"],
        "nothing": None,
    }


def same(got: Any, want: Any) -> bool:
    """Whether two values are of one type, and equal bit for bit."""
    if isinstance(want, torch.Tensor):
        return (
            isinstance(got, torch.Tensor)
            and (got.dtype, got.shape) == (want.dtype, want.shape)
            and torch.equal(_bytes(got), _bytes(want))
        )
    if isinstance(want, np.ndarray):
        return type(got) is type(want) and got.dtype == want.dtype and np.array_equal(got, want)
    return type(got) is type(want) and got == want


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def put(keys: list[str], version: int) -> None:
    """Put samples, each by itself."""
    for key in keys:
        tq.kv_put(key, PARTITION, fields(key, version), tag={"version": version})


def differences() -> list[str]:
    """Return what is not as it was when the checkpoint was saved."""
    listed = tq.kv_list(PARTITION)[PARTITION]
    if listed != {key: {"version": 1} for key in KEYS}:
        return [f"listed: {listed}"]
    found = tq.kv_batch_get(KEYS, PARTITION)
    return [
        f"{field} of {key}: {found[field][at]!r}"[:500]
        for at, key in enumerate(KEYS)
        for field, want in fields(key, 1).items()
        if not same(_plain(found[field][at]), want)
    ]


def _plain(value: Any) -> Any:
    return getattr(value, "data", value) if type(value).__name__ == "NonTensorData" else value


def work_elsewhere(what: str, *arguments: Any) -> Any:
    """Do something in a process of another node, where there is one."""

    @ray.remote(num_cpus=1)
    def work() -> Any:
        tq.init()
        from tests import _transfer_queue_lives as lives

        return getattr(lives, what)(*arguments)

    return ray.get(work.remote())


def main(life: str, place: Place, root: str, checkpoint: Path) -> None:
    """Live, until killed."""
    with raylets(place) as address:
        ray.init(address=address, log_to_driver=False)
        tq.init(OmegaConf.create(configuration(place, root, "life", sweep_s=0.3)))
        if life == "first":
            put(KEYS[::2], 1)
            work_elsewhere("put", KEYS[1::2], 1)
            tq.save_checkpoint(checkpoint)
        else:
            tq.load_checkpoint(checkpoint)
        wrong = differences() + work_elsewhere("differences")
        tq.kv_clear(CLEARED, PARTITION)
        put(REPLACED, 2)
        work_elsewhere("put", REPLACED[:1], 3)
        put(KEYS[-1:], 4)
        tq.kv_put("new", PARTITION, fields(KEYS[0], 5))
        time.sleep(1.0)  # for sweeps
        print("\n".join(wrong) or READY, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))  # type: ignore[arg-type]
