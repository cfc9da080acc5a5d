"""One request while it is generated, and what it is answered."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.generate_request import Request
from tq_fs.demo.sequence import Pass, passes

TextOf = Callable[[Sequence[int]], str]


class Generation:
    """A request while it is generated; `run` in a thread, `abort` from any.

    Parameters
    ----------
    request
        What is asked.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: NDArray[np.float32] = np.empty(0, np.float32)
        self.finish: dict[str, Any] = {}
        self._rows: list[NDArray[np.int32]] = []
        self._aborted = threading.Event()

    def abort(self) -> None:
        """End it at the next token; it keeps what it has. Idempotent."""
        self._aborted.set()

    def run(self, moe: TinyMoe, text_of: TextOf) -> Generation:
        """Generate until something ends it, and return itself.

        Parameters
        ----------
        moe
            Not changed meanwhile.
        text_of
            The text of ids, to look for texts that end it.
        """
        made = iter(passes(moe, self.request.input_ids, self.request.sampling))
        while not self.finish:
            if self._aborted.is_set():
                self.finish = {"type": "abort", "message": "Aborted by request"}
            else:
                self._take(next(made), text_of)
        return self

    def rows(self) -> NDArray[np.int32] | None:
        """Routing rows ``[first_row, P + N - 1)``; None where not even the prompt was computed."""
        if not self._rows:
            return None
        last = len(self.request.input_ids) + len(self.output_ids) - 1
        return np.concatenate(self._rows)[self.request.first_row : last]

    def _take(self, done: Pass, text_of: TextOf) -> None:
        if not self._rows:
            self.prompt_logprobs = done.fed_logprobs
        self._rows.append(done.routed_experts)
        if self.request.max_new_tokens:
            self.output_ids.append(done.token)
            self.logprobs.append(float(done.logprob))
        self.finish = self._ended(text_of)

    def _ended(self, text_of: TextOf) -> dict[str, Any]:
        """Return the reason that ends it after its last token; empty where none does."""
        request = self.request
        if self.output_ids and self.output_ids[-1] in request.stop_ids:
            return {"type": "stop", "matched": self.output_ids[-1]}
        if request.stops:
            text = text_of(self.output_ids)
            for stop in request.stops:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if len(self.output_ids) == request.max_new_tokens:
            return {"type": "length", "length": request.max_new_tokens}
        return {}

    def reply(self, version: str, text_of: TextOf) -> dict[str, Any]:
        """Return the answer of ``/generate``.

        Parameters
        ----------
        version
            Of the weights that made it.
        text_of
            The text of ids.
        """
        request = self.request
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(self.logprobs, self.output_ids, strict=True)
            ],
        }
        if request.logprob_start is not None:
            meta["input_token_logprobs"] = self._input_logprobs(request.logprob_start)
        if request.routing and (rows := self.rows()) is not None:
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
            meta["routed_experts_start_len"] = request.first_row
        return {
            "text": text_of(self.output_ids),
            "output_ids": self.output_ids,
            "meta_info": meta,
        }

    def _input_logprobs(self, start: int) -> list[list[Any]]:
        """Return entries of the prompt's tokens from `start` on; the first token has no logprob."""
        known = [None, *map(float, self.prompt_logprobs)] if self._rows else []
        ids = self.request.input_ids.tolist()
        return [[*entry, None] for entry in zip(known, ids, strict=False)][start:]
