"""What each codec saves and costs on each stored type: ``python benchmarks/codecs.py``.

Ids are drawn from expert popularities as skewed as real routing's (Dirichlet 0.3); logprobs are
exponential. Stored bytes count everything; times are medians of encoding a Step into memory and of
decoding it, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from tq_fs.bench._data import Shape, make_payloads, step_key
from tq_fs.fields import FieldSpec
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, decode, encode_step

REPEATS = 15


def timed(call: Callable[[], object]) -> float:
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(values: np.ndarray, codec: str) -> tuple[float, float, float]:
    """Return stored share, and MB/s of encoding and of decoding."""
    name = values.dtype.name
    spec = FieldSpec(name="x", dtype=name, inner=values.shape[1:], stored=name, codec=codec)
    scratch = Scratch()
    options = EncodeOptions()

    def encode() -> object:
        scratch.reset()
        return encode_step(
            "s", step_key(0), len(values), [FieldArray(spec, values)], options, scratch
        )

    step = encode_step("s", step_key(0), len(values), [FieldArray(spec, values)], options, scratch)
    entry = step.entry.fields["x"]
    layout = entry.layout
    stored = np.frombuffer(
        b"".join(bytes(b) for b in step.members["x/" + layout.object_name]), "u1"
    )
    out = np.empty(layout.chunk_nbytes, np.uint8)
    write = timed(encode)
    read = timed(lambda: np.copyto(out, decode(stored, layout, lambda n: out[:n])))
    return entry.nbytes / values.nbytes, values.nbytes / write / 1e6, values.nbytes / read / 1e6


def main() -> None:
    """Print the table."""
    table = Table(title="Codecs, T=2048, 40 layers, top-8")
    for head in ("values", "codec", "stored share", "encode MB/s", "decode MB/s"):
        table.add_column(head, justify="right" if "M" in head or head.startswith("s") else "left")
    logprobs = -np.random.default_rng(0).exponential(size=2048).astype(np.float32)
    arrays = {
        "uint8, 256 experts": make_payloads(Shape(2048, 40, 8, "uint8"), 1)[0].narrow,
        "uint16, 384 experts": make_payloads(Shape(2048, 40, 8, "uint16"), 1)[0].narrow,
        "int32, 384 experts": make_payloads(Shape(2048, 40, 8, "int32"), 1)[0].narrow,
        "logprobs, float32": logprobs,
    }
    for name, values in arrays.items():
        for codec in ("none", "lz4", "zstd"):
            share, encode, decode_ = measure(values, codec)
            table.add_row(name, codec, f"{share:.2f}", f"{encode:,.0f}", f"{decode_:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
