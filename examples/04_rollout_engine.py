"""A rollout engine that runs here: a small Qwen3-MoE behind SGLang's ``/generate``, on the CPU.

    pip install 'tq-fs[demo,proxy]'
    python examples/04_rollout_engine.py                                 # shows itself, and ends
    python examples/04_rollout_engine.py --port 30000 --model FOLDER     # serves until Ctrl-C

A folder without weights gets random ones; without a folder the model is a default one. The first
line that it prints when it serves is its URL.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tq_fs.demo.sglang import EngineServer
from tq_fs.demo.tokenizer import save_tokenizer
from tq_fs.model_config import routed_experts_of_model
from tq_fs.proxy import ChatTemplate


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model, or show what serving one gives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="FOLDER", help="configuration, tokenizer, weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="0 takes a free one")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tq-fs-engine-") as own:
        folder = options.model or str(save_tokenizer(own))
        server = EngineServer.of_folder(
            folder, seed=options.seed, host=options.host, port=options.port or 0
        )
        with server:
            if options.port is None and options.model is None:
                return show(server.url, folder)
            print(server.url, flush=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
    return 0


def show(url: str, folder: str) -> int:
    """Ask for a reply, and for the one after it; 0 if the same request gives the same bytes."""
    template = ChatTemplate.from_model(folder)
    layers, topk = routed_experts_of_model(folder).inner
    question = template.render(
        [{"role": "user", "content": "How many experts?"}], None, generation_prompt=True
    )
    prompt = template.encode(question).tolist()
    print(f"1. {len(prompt)} tokens go to {url}/generate.")
    first = ask(url, prompt, first_row=0)
    told(first, layers, topk)

    print("\n2. The conversation goes on; rows of what was recorded before are not asked for.")
    tokens = prompt + first["output_ids"]
    new = template.encode("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n").tolist()
    second = ask(url, tokens + new, first_row=len(tokens) - 1)
    told(second, layers, topk)

    print("\n3. The first request again.")
    again = ask(url, prompt, first_row=0)
    same = {**again["meta_info"], "id": ""} == {**first["meta_info"], "id": ""}
    print(f"   {'The same' if same else 'NOT the same'} tokens, logprobs and experts.")
    return 0 if same else 1


def ask(url: str, input_ids: list[int], first_row: int) -> Any:
    """Ask for 16 tokens, with logprobs and the routing rows from `first_row` on."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 16, "temperature": 1.0, "sampling_seed": 7},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": first_row,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def told(reply: Any, layers: int, topk: int) -> None:
    """Print what came back."""
    meta = reply["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, layers, topk)
    first = meta["routed_experts_start_len"]
    mean = np.mean([entry[0] for entry in meta["output_token_logprobs"]])
    print(
        f"   {len(reply['output_ids'])} tokens of weight version {meta['weight_version']!r}, "
        f"finish reason {meta['finish_reason']['type']}, mean logprob {mean:.3f}"
    )
    print(f"   routing rows {first} to {first + len(rows)}: {list(rows.shape)} {rows.dtype}")
    print(f"   the last token that was fed went to experts {rows[-1].tolist()}, layer by layer")


if __name__ == "__main__":
    sys.exit(main())
