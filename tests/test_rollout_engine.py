"""The demo's rollout engine over HTTP: a reply depends on its request and the weights alone."""

from __future__ import annotations

import base64
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("aiohttp")

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.sequence import Pass, Sampling, _drawn, passes
from tq_fs.demo.sglang import EngineServer
from tq_fs.demo.tokenizer import STOP_IDS, VOCAB, save_tokenizer
from tq_fs.demo.weights import load_model, save_model, take_weights
from tq_fs.errors import InvalidConfig
from tq_fs.fields import routed_experts
from tq_fs.ingest import Asked, parse_reply

SCALE = {"layers": 3, "experts": 16, "topk": 2, "hidden": 32, "vocab": VOCAB}
EXAMPLE = Path(__file__).parent.parent / "examples" / "04_rollout_engine.py"
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def call(url: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """Status, and the JSON of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(read) if read else None


def body_of(prompt: Sequence[int] = PROMPT, new: int = 12, first: int = 0, **more: Any) -> Any:
    sampling = {"max_new_tokens": new, "sampling_seed": 5, "ignore_eos": True}
    return {
        "input_ids": list(prompt),
        "sampling_params": {**sampling, **more.pop("sampling", {})},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": first,
        **more,
    }


def ask(url: str, body: Any) -> Any:
    status, reply = call(url, "/generate", body)
    assert status == 200, reply
    return reply


def rows_of(reply: Any) -> np.ndarray:
    data = base64.b64decode(reply["meta_info"]["routed_experts"])
    return np.frombuffer(data, "<i4").reshape(-1, SCALE["layers"], SCALE["topk"])


def logprobs_of(reply: Any) -> np.ndarray:
    return np.array([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])


def content(reply: Any) -> Any:
    """All of a reply but its id."""
    return {**reply, "meta_info": {**reply["meta_info"], "id": ""}}


def wait_until(true: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineServer]:
    with EngineServer(TinyMoe(**SCALE)) as server:
        yield server


@pytest.fixture(scope="module")
def url(engine: EngineServer) -> str:
    return engine.url


@pytest.fixture(scope="module")
def reply(url: str) -> Any:
    return ask(url, body_of())


# ---------------------------------------------------------------- what a reply says


def test_our_parser_takes_the_reply(url: str) -> None:
    spec = routed_experts(layers=SCALE["layers"], topk=SCALE["topk"], experts=SCALE["experts"])
    for first in (0, 4, len(PROMPT) - 1):
        asked = Asked(prompt_tokens=len(PROMPT), start_row=first, max_new_tokens=12, routing=spec)
        made = ask(url, body_of(first=first))
        parsed = parse_reply(asked, json.dumps(made).encode())
        assert parsed.output_ids.tolist() == made["output_ids"]
        assert parsed.routed_experts is not None
        np.testing.assert_array_equal(parsed.routed_experts, rows_of(made))
        assert (parsed.version, parsed.finish) == ("0", "length")


def test_rows_are_those_of_all_tokens_but_the_last(reply: Any) -> None:
    assert rows_of(reply).shape == (len(PROMPT) + 12 - 1, 3, 2)
    assert reply["meta_info"]["prompt_tokens"] == len(PROMPT)
    assert reply["meta_info"]["completion_tokens"] == 12
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@pytest.mark.parametrize("first", [1, 5, len(PROMPT) - 1])
def test_a_delta_is_the_end_of_all_rows(url: str, reply: Any, first: int) -> None:
    delta = ask(url, body_of(first=first))
    np.testing.assert_array_equal(rows_of(delta), rows_of(reply)[first:])
    assert delta["output_ids"] == reply["output_ids"]


def test_rows_and_input_logprobs_come_where_asked_for(url: str, reply: Any) -> None:
    plain = ask(url, body_of(return_routed_experts=False))
    assert "routed_experts" not in plain["meta_info"]
    assert "input_token_logprobs" not in plain["meta_info"]
    assert plain["output_ids"] == reply["output_ids"]
    full = ask(url, body_of(logprob_start_len=2))["meta_info"]
    assert [entry[1] for entry in full["input_token_logprobs"]] == PROMPT[2:]
    first = ask(url, body_of(logprob_start_len=0))["meta_info"]["input_token_logprobs"]
    assert first[0][0] is None
    assert first[2:] == full["input_token_logprobs"]


def test_logprobs_agree_with_the_models_forward_pass(url: str) -> None:
    moe = TinyMoe(**SCALE)
    reply = ask(url, body_of(new=40, logprob_start_len=0))
    tokens = np.array(PROMPT + reply["output_ids"])
    with torch.no_grad():
        logits = moe.forward(tokens, routing=rows_of(reply))
    expected = moe.token_logprobs(logits, tokens).numpy()
    np.testing.assert_allclose(logprobs_of(reply), expected[-40:], atol=1e-4)
    prompt = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(prompt, expected[: len(prompt)], atol=1e-4)
    own = np.sort(moe.routing_of(tokens))
    assert (own == np.sort(rows_of(reply))).all(-1).mean() > 0.99
    # float32 goes through JSON without a loss
    assert logprobs_of(reply).astype(np.float32).tolist() == logprobs_of(reply).tolist()


def test_no_new_tokens_give_the_prompts_rows(url: str, reply: Any) -> None:
    nothing = ask(url, body_of(new=0))
    assert nothing["output_ids"] == []
    assert nothing["meta_info"]["finish_reason"]["type"] == "length"
    np.testing.assert_array_equal(rows_of(nothing), rows_of(reply)[: len(PROMPT) - 1])


# ---------------------------------------------------------------- nothing else matters


def test_a_reply_depends_on_neither_order_nor_company(url: str) -> None:
    random = np.random.default_rng(0)
    bodies = [
        body_of(
            random.integers(0, 200, random.integers(1, 60)).tolist(),
            new=int(random.integers(1, 24)),
            sampling={"sampling_seed": int(random.integers(1, 2**40))},
        )
        for _ in range(12)
    ]
    alone = [content(ask(url, body)) for body in bodies]
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(len(bodies))
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda at: content(ask(url, bodies[at])), order))
        for at, found in zip(order, together, strict=True):
            assert found == alone[at]


def test_another_server_of_the_same_weights_gives_the_same(reply: Any) -> None:
    before = torch.get_num_threads()
    with EngineServer(TinyMoe(**SCALE), at_once=1) as server:
        assert content(ask(server.url, body_of())) == content(reply)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_threads_record_their_own_routing_only() -> None:
    moe = TinyMoe(**SCALE)
    prompts = [np.arange(n) % VOCAB for n in (3, 40, 17, 80)]
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def rows(prompt: np.ndarray) -> np.ndarray:
        torch.set_num_threads(1)
        made = passes(moe, prompt, Sampling(seed=1))
        return np.concatenate([next(made).routed_experts for _ in range(20)])

    try:
        alone = [rows(prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            for ours, theirs in zip(alone, pool.map(rows, prompts), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    finally:
        torch.set_num_threads(torch_threads)


# ---------------------------------------------------------------- how tokens are drawn


def test_seeds_give_streams_of_their_own(url: str, reply: Any) -> None:
    other = ask(url, body_of(sampling={"sampling_seed": 6}))
    assert other["output_ids"] != reply["output_ids"]
    negative = body_of(sampling={"sampling_seed": -3})
    assert content(ask(url, negative)) == content(ask(url, negative))


def test_temperature_zero_takes_the_most_probable(url: str) -> None:
    first, second = (
        ask(url, body_of(sampling={"temperature": 0, "sampling_seed": seed})) for seed in (1, 2)
    )
    assert content(first) == content(second)
    tokens = np.array(PROMPT + first["output_ids"])
    moe = TinyMoe(**SCALE)
    with torch.no_grad():
        logits = moe.forward(tokens, routing=rows_of(first))
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == first["output_ids"]


def shares(sampling: dict[str, Any], draws: int = 2000) -> np.ndarray:
    logits = torch.tensor([0.5, 0.0, 0.2, 0.3]).log()
    drawn = [_drawn(logits, Sampling(seed=seed, **sampling), 7) for seed in range(draws)]
    return np.bincount(drawn, minlength=4) / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.5, 0, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0, 0.04 / 0.38, 0.09 / 0.38]),
        ({"top_p": 0.7}, [0.625, 0, 0, 0.375]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.625, 0, 0, 0.375]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.5, 0, 0.2, 0.3]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(sampling: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(shares(sampling), expected, atol=0.05)


def test_draws_differ_by_position() -> None:
    logits = torch.zeros(1000)
    assert len({_drawn(logits, Sampling(seed=1), at) for at in range(50)}) > 40


# ---------------------------------------------------------------- what ends a generation


def test_a_stop_token_ends_it_and_is_part_of_it(url: str, reply: Any) -> None:
    stop = reply["output_ids"][5]
    at = reply["output_ids"].index(stop)
    ended = ask(url, body_of(sampling={"stop_token_ids": [stop]}))
    assert ended["output_ids"] == reply["output_ids"][: at + 1]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    np.testing.assert_array_equal(rows_of(ended), rows_of(reply)[: len(PROMPT) + at])


def test_the_models_own_end_ends_it_unless_ignored(reply: Any) -> None:
    end = reply["output_ids"][3]
    at = reply["output_ids"].index(end)
    with EngineServer(TinyMoe(**SCALE), eos_ids=[end]) as server:
        ended = ask(server.url, body_of(sampling={"ignore_eos": False}))
        assert ended["output_ids"] == reply["output_ids"][: at + 1]
        assert ask(server.url, body_of())["output_ids"] == reply["output_ids"]


def test_a_text_ends_it(url: str) -> None:
    body = body_of(sampling={"temperature": 0})
    whole = ask(url, body)
    text = bytes(i for i in whole["output_ids"] if i < 256).decode("utf-8", "replace")
    stop = next(c for c in text if c != "\ufffd")
    body["sampling_params"]["stop"] = [stop]
    ended = ask(url, body)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ended["output_ids"] == whole["output_ids"][: len(ended["output_ids"])]
    assert stop in ended["text"]


def aborted(engine: EngineServer, body: Any, tokens: int, *, everything: bool = False) -> Any:
    """The reply to a request that is aborted once it has some tokens."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, engine.url, body)
        wait_until(lambda: made_of(engine, body["rid"]) >= tokens)
        abort = {"abort_all": True} if everything else {"rid": body["rid"]}
        assert call(engine.url, "/abort_request", abort)[0] == 200
        return asked.result()


def made_of(engine: EngineServer, rid: str) -> int:
    """Tokens that a running request has by now."""
    generation = engine._running.get(rid)
    return 0 if generation is None else len(generation.output_ids)


@pytest.mark.parametrize("everything", [False, True])
def test_an_aborted_generation_goes_on_on_the_same_stream(
    engine: EngineServer, everything: bool
) -> None:
    whole = ask(engine.url, body_of(new=60))
    part = aborted(engine, body_of(new=10_000, rid="a"), 8, everything=everything)
    made = part["output_ids"]
    assert part["meta_info"]["finish_reason"]["type"] == "abort"
    assert 8 <= len(made) < 10_000
    same = min(len(made), 60)
    assert made[:same] == whole["output_ids"][:same]
    assert rows_of(part).shape[0] == len(PROMPT) + len(made) - 1
    np.testing.assert_array_equal(
        rows_of(part)[: len(PROMPT) + same - 1], rows_of(whole)[: len(PROMPT) + same - 1]
    )
    cut = 20  # as if it had been aborted there
    rest = ask(engine.url, body_of(PROMPT + whole["output_ids"][:cut], new=60 - cut, first=3))
    assert rest["output_ids"] == whole["output_ids"][cut:]
    np.testing.assert_allclose(logprobs_of(rest), logprobs_of(whole)[cut:], atol=1e-4)


def test_an_abort_of_something_unknown_does_nothing(url: str, reply: Any) -> None:
    assert call(url, "/abort_request", {"rid": "nobody"})[0] == 200
    assert content(ask(url, body_of(rid="nobody"))) == content(reply)


def test_an_abort_of_a_waiting_request_gives_nothing_new() -> None:
    with EngineServer(TinyMoe(**SCALE), at_once=1) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server.url, body_of(new=10_000, rid="first"))
        wait_until(lambda: made_of(server, "first") > 0)
        second = pool.submit(ask, server.url, body_of(rid="second"))
        wait_until(lambda: "second" in server._running)
        call(server.url, "/abort_request", {"rid": "second"})
        call(server.url, "/abort_request", {"rid": "first"})
        assert len(first.result()["output_ids"]) > 0
        waiting = second.result()
        assert waiting["output_ids"] == []
        assert waiting["meta_info"]["finish_reason"]["type"] == "abort"
        assert "routed_experts" not in waiting["meta_info"]


def test_a_client_that_goes_away_ends_its_generation(engine: EngineServer) -> None:
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc)
    connection.request("POST", "/generate", json.dumps(body_of(new=20_000, rid="left")))
    wait_until(lambda: made_of(engine, "left") > 0)
    connection.close()
    wait_until(lambda: "left" not in engine._running)
    assert call(engine.url, "/health", method="GET")[0] == 200


def test_a_server_that_stops_ends_what_runs() -> None:
    server = EngineServer(TinyMoe(**SCALE)).start()
    failed = []

    def give_up() -> None:
        try:
            ask(server.url, body_of(new=20_000, rid="long"))
        except (http.client.HTTPException, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=give_up)
    thread.start()
    wait_until(lambda: made_of(server, "long") > 0)
    server.stop()
    server.stop()
    thread.join(10)
    assert len(failed) == 1


# ---------------------------------------------------------------- weights


def info(url: str) -> Any:
    return call(url, "/model_info", method="GET")[1]


def test_weights_come_from_a_folder_with_their_version(tmp_path: Path) -> None:
    first, second = TinyMoe(**SCALE), TinyMoe(**SCALE, seed=1)
    folder = save_model(second, tmp_path / "second")
    with EngineServer.of_folder(save_model(first, tmp_path / "first"), version="7") as server:
        before = ask(server.url, body_of())
        assert before["meta_info"]["weight_version"] == info(server.url)["weight_version"] == "7"
        update = {"model_path": str(folder), "weight_version": "8"}
        assert call(server.url, "/update_weights_from_disk", update) == (
            200,
            {"success": True, "message": "Succeeded to update model weights."},
        )
        after = ask(server.url, body_of())
        version = call(server.url, "/get_weight_version", method="GET")[1]["weight_version"]
        assert after["meta_info"]["weight_version"] == version == "8"
        assert call(server.url, "/flush_cache")[0] == 200
    assert after["output_ids"] != before["output_ids"]
    with EngineServer(second, version="8") as server:
        assert content(ask(server.url, body_of())) == content(after)


def test_new_weights_wait_for_what_is_generated(tmp_path: Path, reply: Any) -> None:
    folder = save_model(TinyMoe(**SCALE, seed=1), tmp_path)
    update = {"model_path": str(folder), "weight_version": "1"}
    with EngineServer(TinyMoe(**SCALE)) as server, ThreadPoolExecutor(3) as pool:
        running = pool.submit(ask, server.url, body_of(new=150, rid="running"))
        wait_until(lambda: made_of(server, "running") > 0)
        updated = pool.submit(call, server.url, "/update_weights_from_disk", update)
        wait_until(lambda: server._weights._changers == 1)
        later = pool.submit(ask, server.url, body_of(rid="later"))
        assert updated.result()[0] == 200
        assert running.result()["meta_info"]["weight_version"] == "0"
        assert running.result()["output_ids"][:12] == reply["output_ids"]
        assert later.result()["meta_info"]["weight_version"] == "1"
        assert later.result()["output_ids"] != reply["output_ids"]


def test_new_weights_may_abort_what_is_generated(tmp_path: Path) -> None:
    folder = save_model(TinyMoe(**SCALE, seed=1), tmp_path)
    update = {"model_path": str(folder), "weight_version": "1", "abort_all_requests": True}
    with EngineServer(TinyMoe(**SCALE)) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server.url, body_of(new=20_000, rid="running"))
        wait_until(lambda: made_of(server, "running") > 0)
        assert call(server.url, "/update_weights_from_disk", update)[0] == 200
        meta = running.result()["meta_info"]
        assert (meta["finish_reason"]["type"], meta["weight_version"]) == ("abort", "0")


def test_weights_that_do_not_fit_change_nothing(url: str, reply: Any, tmp_path: Path) -> None:
    other = save_model(TinyMoe(**{**SCALE, "layers": 2}), tmp_path / "other")
    for folder in (other, tmp_path / "nowhere", save_tokenizer(tmp_path / "without")):
        update = {"model_path": str(folder), "weight_version": "9"}
        status, said = call(url, "/update_weights_from_disk", update)
        assert (status, said["success"]) == (400, False)
        assert str(folder) in said["message"]
    assert content(ask(url, body_of())) == content(reply)


def test_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    moe, other = TinyMoe(**SCALE, seed=4), TinyMoe(**SCALE)
    loaded = load_model(save_model(moe, tmp_path))
    take_weights(other, tmp_path)
    for name, weight in moe.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
        assert torch.equal(other.model.state_dict()[name], weight), name


def test_a_folder_without_weights_gives_random_ones(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, TinyMoe(**SCALE).model.config.to_dict())
    ours, other = (load_model(folder, seed=seed).model.state_dict() for seed in (0, 1))
    plain = TinyMoe(**SCALE).model.state_dict()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert not torch.equal(ours["lm_head.weight"], other["lm_head.weight"])


def test_folders_that_hold_no_such_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(InvalidConfig, match="no such model"):
        load_model(tmp_path)
    save_model(TinyMoe(**SCALE), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"oops")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        load_model(tmp_path)


# ---------------------------------------------------------------- bad requests


def without(name: str) -> Any:
    body = body_of()
    del body[name]
    return body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{oops", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([], "no JSON object"),
        (without("input_ids"), "input_ids"),
        (body_of([]), "input_ids"),
        (body_of(input_ids=[1, "a"]), r"input_ids\[1\]"),
        (body_of([1, True]), r"input_ids\[1\]"),
        (body_of([1, VOCAB]), f"0..{VOCAB - 1}"),
        (body_of([-1]), "input_ids"),
        (body_of(input_ids=[[1], [2]]), "input_ids"),
        (body_of(input_ids="abc"), "input_ids"),
        (body_of(new=-1), "max_new_tokens"),
        (body_of(sampling={"max_new_tokens": 1.5}), "max_new_tokens"),
        (body_of(sampling_params=[1]), "sampling_params"),
        (body_of(sampling={"temperature": -1}), "temperature"),
        (body_of(sampling={"temperature": "hot"}), "temperature"),
        (body_of(sampling={"temperature": float("nan")}), "temperature"),
        (body_of(sampling={"top_p": 0}), "top_p"),
        (body_of(sampling={"top_p": 1.1}), "top_p"),
        (body_of(sampling={"top_k": -2}), "top_k"),
        (body_of(sampling={"sampling_seed": "a"}), "sampling_seed"),
        (body_of(sampling={"stop_token_ids": [VOCAB]}), "stop_token_ids"),
        (body_of(sampling={"stop": [""]}), "stop"),
        (body_of(sampling={"presence_penalty": 0.5}), "presence_penalty"),
        (body_of(sampling={"n": 2}), "sampling_params.n"),
        (body_of(sampling={"unheard_of": 1}), "unheard_of"),
        (body_of(first=-1), "routed_experts_start_len"),
        (body_of(first=len(PROMPT)), "routed_experts_start_len"),
        (body_of(logprob_start_len="0"), "logprob_start_len"),
        (body_of(new=32768), "context length"),
    ],
)
def test_bad_requests_are_answered_400(url: str, body: Any, says: str) -> None:
    status, answer = call(url, "/generate", body)
    assert status == 400, answer
    with pytest.raises(ValueError, match=says):
        raise ValueError(answer["error"]["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {}),
        ("/abort_request", []),
        ("/abort_request", b"oops"),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": 7}),
        ("/update_weights_from_disk", {"model_path": "/", "weight_version": 7}),
    ],
)
def test_other_bad_requests_are_answered_400(url: str, path: str, body: Any) -> None:
    assert call(url, path, body)[0] == 400


def test_settings_that_ask_for_nothing_are_taken(url: str, reply: Any) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "min_p": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
    }
    neutral |= {"skip_special_tokens": False, "top_p": None, "stop": None, "stop_token_ids": None}
    assert content(ask(url, body_of(sampling=neutral))) == content(reply)


def test_a_rid_that_runs_is_refused(engine: EngineServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, engine.url, body_of(new=10_000, rid="twice"))
        wait_until(lambda: made_of(engine, "twice") > 0)
        assert call(engine.url, "/generate", body_of(rid="twice"))[0] == 400
        call(engine.url, "/abort_request", {"rid": "twice"})
        assert len(running.result()["output_ids"]) > 0


# ---------------------------------------------------------------- one sequence, and the example


def test_a_sequence_is_that_of_the_batch_of_one() -> None:
    moe = TinyMoe(**SCALE)
    made = passes(moe, np.array(PROMPT), Sampling(seed=3))
    taken: list[Pass] = [next(made) for _ in range(10)]
    assert [len(done.routed_experts) for done in taken] == [len(PROMPT), *[1] * 9]
    assert [len(done.fed_logprobs) for done in taken] == [len(PROMPT) - 1, *[0] * 9]
    tokens = np.array(PROMPT + [done.token for done in taken])
    rows = np.concatenate([done.routed_experts for done in taken])
    assert (np.sort(rows) == np.sort(moe.routing_of(tokens))).all(-1).mean() > 0.99


@pytest.mark.slow
def test_the_example_shows_itself() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "routing rows 0 to 51: [51, 4, 2] int32" in done.stdout
    assert "The same tokens, logprobs and experts." in done.stdout


@pytest.mark.slow
def test_the_example_serves_a_folder_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = save_model(TinyMoe(**SCALE), tmp_path)
    command = [sys.executable, str(EXAMPLE), "--port", "0", "--model", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert info(url)["model_path"] == str(folder)
            reply = ask(url, body_of(sampling={"stop_token_ids": list(STOP_IDS)}))
            assert rows_of(reply).shape[1:] == (3, 2)
            process.send_signal(2)
            assert process.wait(30) == 0
        finally:
            process.kill()
