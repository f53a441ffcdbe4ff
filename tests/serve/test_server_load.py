"""The real engine behind the real server: many streams at once, some of them cut, beside bad requests and probes."""

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn

from rorqual.serve.api.app import create_app
from rorqual.serve.api.server import DrainingServer
from rorqual.serve.api.service import ServerInfo

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NUM_STREAMS = 64
NUM_CUT = 16
PROMPT_TOKENS = (1, 2, 3, 30, 127, 128, 129, 60, 5, 255, 256, 257, 400, 640, 1500)
SETTLE_S = 5.0


class Server:
    """The demo model behind uvicorn on a loopback port."""

    def __init__(self, llm) -> None:
        self.engine = llm.engine
        self.tokenizer = llm.text.tokenizer
        app = create_app(llm.engine, llm.text, ServerInfo(("demo",)))
        self.runs = app.state.service.runs
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
        self._server = DrainingServer(config, app.state.service, drain_timeout_s=5)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits, verify=False)

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """Run a client's coroutine to its end."""

        async def with_client() -> Any:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(with_client())


@pytest.fixture(scope="module")
def server(demo_llm) -> Iterator[Server]:
    server = Server(demo_llm)
    yield server
    server.close()


@pytest.fixture
def undisturbed(server: Server) -> Iterator[None]:
    """Around a test: every page free again soon after it, nobody left over, nothing compiled."""
    free = server.engine.num_free_pages
    assert server.engine.num_live == 0
    yield
    assert wait_for(lambda: server.engine.num_live == 0 and server.engine.num_free_pages == free)
    assert wait_for(lambda: server.runs.num_open == 0)
    assert server.engine.num_compiles == 0
    assert server.engine.alive()


def wait_for(condition: Callable[[], bool], timeout_s: float = SETTLE_S) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


class Ask(NamedTuple):
    """A streaming request. `cut` None: it runs to its end; else the client leaves after so many pieces of the answer,
    or `delay_s` after sending where that is 0."""

    path: str
    body: dict[str, Any]
    num_prompt: int | None  # None: the chat encoding decides
    cut: int | None
    delay_s: float


@dataclass
class Heard:
    """What a client got of a stream: the objects between the frames, and whether [DONE] came."""

    objects: list[dict[str, Any]]
    done: bool


SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.02},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.2, "top_p": 0.5, "logprobs": 5},
    {"logit_bias": {"1000": 5.0, "2000": -100.0}, "min_tokens": 2},
)


def make_ask(number: int, rng: random.Random) -> Ask:
    """A request drawn at random; the first ones take every prompt length and every kind of sampling in turn."""
    length = PROMPT_TOKENS[number] if number < len(PROMPT_TOKENS) else rng.choice(PROMPT_TOKENS[:9])
    body = {
        **SAMPLING[number % len(SAMPLING)],
        "max_tokens": rng.choice((1, 2, 5, 12, 24)),
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    cut = rng.choice((0, 0, 1, 2, 5)) if number % (NUM_STREAMS // NUM_CUT) == 3 else None
    if cut is not None:
        body["max_tokens"] = 400
    delay_s = rng.choice((0.0, 0.05, 0.5, 2.0))
    ids = [rng.randrange(10, 100_000) for _ in range(length)]
    if rng.random() < 0.6:
        return Ask(COMPLETIONS, {**body, "prompt": ids}, length, cut, delay_s)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    words = " ".join(f"word{i % 97}" for i in ids[: length // 3]) or "x"
    return Ask(CHAT, {**body, "messages": [{"role": "user", "content": words}]}, None, cut, delay_s)


async def stream(client: httpx.AsyncClient, ask: Ask) -> Heard:
    """Send a request and read its stream to the end, or to where the client leaves: that closes the socket."""
    if ask.cut == 0:
        try:
            return await asyncio.wait_for(read_stream(client, ask), ask.delay_s)
        except TimeoutError:
            return Heard([], False)
    return await read_stream(client, ask)


async def read_stream(client: httpx.AsyncClient, ask: Ask) -> Heard:
    heard = Heard([], False)
    async with client.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code != 200:
            raise AssertionError((await response.aread()).decode())
        assert response.headers["content-type"].startswith("text/event-stream")
        rest = ""
        async for piece in response.aiter_text():
            *frames, rest = (rest + piece).split("\n\n")
            for frame in frames:
                assert not heard.done, "a frame after [DONE]"
                assert frame.startswith("data: ") and "\n" not in frame, frame
                data = frame.removeprefix("data: ")
                heard.done = data == "[DONE]"
                if not heard.done:
                    heard.objects.append(json.loads(data))
            if ask.cut is not None and len(heard.objects) >= ask.cut:
                return heard
        assert not rest
    return heard


async def send_bad(client: httpx.AsyncClient, until: asyncio.Event) -> int:
    """Requests that are refused, one after the other."""
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        (COMPLETIONS, {"prompt": [7] * 4096}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": "x", "temperature": 1e9}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "another"}),
    )
    num_sent = 0
    while not until.is_set():
        path, body = bodies[num_sent % len(bodies)]
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        num_sent += 1
        await asyncio.sleep(0.1)
    return num_sent


async def probe(client: httpx.AsyncClient, until: asyncio.Event) -> list[float]:
    """Seconds that /health and /ready took to say yes."""
    waits = []
    while not until.is_set():
        for path in ("/health", "/ready"):
            start = time.monotonic()
            answer = await client.get(path)
            waits.append(time.monotonic() - start)
            assert answer.status_code == 200, answer.text
        await asyncio.sleep(0.1)
    return waits


async def storm(client: httpx.AsyncClient, asks: list[Ask]) -> tuple[list[Heard], list[float], int]:
    """All streams at once, with probes and bad requests beside them."""
    until = asyncio.Event()

    async def streams() -> list[Heard]:
        try:
            return await asyncio.gather(*(stream(client, ask) for ask in asks))
        finally:
            until.set()

    work: tuple[Awaitable[Any], ...] = (streams(), probe(client, until), send_bad(client, until))
    heard, waits, num_bad = await asyncio.gather(*work)
    return heard, waits, num_bad


def label_bytes(label: str) -> bytes:
    """Bytes of a token as the logprobs columns of a completion spell it."""
    if not label.startswith("bytes:"):
        return label.encode()
    return bytes(int(code, 16) for code in re.findall(r"\\x(..)", label))


def check_completion(server: Server, ask: Ask, heard: Heard) -> None:
    *pieces, last = heard.objects
    assert last["choices"] == [] and all(piece["usage"] is None for piece in pieces)
    assert {(o["id"], o["object"], o["model"]) for o in heard.objects} == {(last["id"], "text_completion", "demo")}
    choices = [piece["choices"][0] for piece in pieces]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    check_usage(last["usage"], ask)
    if "logprobs" not in ask.body:
        return
    columns = [choice["logprobs"] for choice in choices]
    labels = [label for column in columns for label in column["tokens"]]
    assert len(labels) == ask.body["max_tokens"]
    silent = {server.tokenizer.token_label(i) for i in server.tokenizer.silent_ids}
    spelled = b"".join(label_bytes(label) for label in labels if label not in silent)
    assert "".join(choice["text"] for choice in choices) == spelled.decode(errors="replace")
    assert all(value <= 0 for column in columns for value in column["token_logprobs"])
    check_best([[*best.values()] for column in columns for best in column["top_logprobs"]], ask.body["logprobs"])


def check_chat(ask: Ask, heard: Heard) -> None:
    *pieces, last = heard.objects
    assert last["choices"] == [] and all(piece["usage"] is None for piece in pieces)
    assert {(o["id"], o["object"], o["model"]) for o in heard.objects} == {
        (last["id"], "chat.completion.chunk", "demo")
    }
    choices = [piece["choices"][0] for piece in pieces]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    check_usage(last["usage"], ask)
    if "logprobs" not in ask.body:
        return
    num_entries = 0
    for section in ("reasoning_content", "content"):
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"].get(section) or ()]
        text = "".join(choice["delta"].get(section) or "" for choice in choices)
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace") == text
        check_best([[best["logprob"] for best in entry["top_logprobs"]] for entry in entries], ask.body["top_logprobs"])
        num_entries += len(entries)
    assert num_entries == ask.body["max_tokens"]


def check_usage(usage: dict[str, Any], ask: Ask) -> None:
    assert usage["completion_tokens"] == ask.body["max_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert ask.num_prompt in (None, usage["prompt_tokens"])


def check_best(columns: list[list[float]], wanted: int) -> None:
    """Alternatives: as many as wanted, best first."""
    assert all(len(values) == wanted and values == sorted(values, reverse=True) for values in columns)


def test_many_streams_some_cut(server: Server, undisturbed: None) -> None:
    rng = random.Random(5)
    asks = [make_ask(number, rng) for number in range(NUM_STREAMS)]
    assert sum(ask.cut is not None for ask in asks) == NUM_CUT
    heard, waits, num_bad = server.run(lambda client: storm(client, asks))
    whole = [(ask, got) for ask, got in zip(asks, heard, strict=True) if ask.cut is None]
    assert all(got.done for _, got in whole)
    for ask, got in whole:
        if ask.path == CHAT:
            check_chat(ask, got)
        else:
            check_completion(server, ask, got)
    assert not any(got.done for ask, got in zip(asks, heard, strict=True) if ask.cut is not None)
    assert num_bad > 7 and len(waits) > 20
    assert sorted(waits)[-2] < 1.0  # one slip is the machine's that runs the tests
    # What was cut costs nobody anything afterwards.
    assert wait_for(lambda: server.engine.num_live == 0)
    for number in range(5):
        body = {"prompt": "The whale", "max_tokens": 4, "seed": number, "ignore_eos": True}
        whole_answer = httpx.post(server.url + COMPLETIONS, json=body).json()
        assert whole_answer["usage"]["completion_tokens"] == 4
        pieces = server.run(partial(read_stream, ask=Ask(COMPLETIONS, {**body, "stream": True}, None, None, 0))).objects
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole_answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(COMPLETIONS, {"prompt": ["x", "y"]}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})],
)
def test_a_client_that_leaves_frees_its_row(server: Server, undisturbed: None, path: str, prompt: dict) -> None:
    """Without streaming too; the answer would take minutes."""
    body = {**prompt, "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=1.0)
    assert wait_for(lambda: server.engine.num_live == 0, 2.0)


def test_a_stop_string_ends_the_row(server: Server, undisturbed: None) -> None:
    """The text ends before it, and the row ends with it."""
    body = {"prompt": "The whale", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = httpx.post(server.url + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"]
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 2]
    start = time.monotonic()
    answer = httpx.post(server.url + COMPLETIONS, json={**body, "max_tokens": 4000, "stop": stop}, timeout=60).json()
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 12
    assert time.monotonic() - start < 20


def test_a_prompt_beyond_the_context_is_refused(server: Server, undisturbed: None) -> None:
    for prompt in ([7] * 4096, "word " * 5000):
        answer = httpx.post(server.url + COMPLETIONS, json={"prompt": prompt})
        assert answer.status_code == 400
        assert re.search(r"^prompt: .*\d+ tokens, allowed .*4095", answer.json()["error"]["message"])
