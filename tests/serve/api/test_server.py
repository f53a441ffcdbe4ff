"""A real server on loopback: disconnects, slow clients, a dying engine, the drain."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from rorqual.serve.api.server import DrainingServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Say hi."}]


class Live:
    """An application behind uvicorn in a thread."""

    def __init__(self, api) -> None:
        self.engine = api.engine
        self.service = api.app.state.service
        config = uvicorn.Config(api.app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
        self.server = DrainingServer(config, self.service, drain_timeout_s=5)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()

    def connect(self, path: str, body: dict) -> socket.socket:
        """A raw connection that has sent a request."""
        client = socket.create_connection(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client.sendall(head.encode() + data)
        return client


@pytest.fixture
def go_live() -> Iterator[Callable[..., Live]]:
    servers: list[Live] = []

    def start(api) -> Live:
        servers.append(Live(api))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": ["x", "y"]}), (CHAT, {"messages": USER})])
def test_a_client_that_leaves_frees_its_rows(make_api, go_live, path: str, prompt: dict, stream: bool) -> None:
    live = go_live(make_api([100] * 4000, delay_s=0.01))
    client = live.connect(path, {**prompt, "max_tokens": 3000, "stream": stream})
    assert wait_for(lambda: live.engine.num_open > 0 and live.engine.num_steps > 3)
    client.close()
    before = live.engine.num_steps
    assert live.engine.wait_idle()
    assert live.engine.num_steps - before < 30
    assert set(live.engine.finished.values()) == {"abort"}
    assert wait_for(lambda: live.service.runs.num_open == 0)


def test_a_client_that_leaves_before_the_first_token(make_api, go_live) -> None:
    live = go_live(make_api([100] * 40, delay_s=0.4))
    client = live.connect(COMPLETIONS, {"prompt": "x", "stream": True})
    assert wait_for(lambda: live.engine.num_open == 1)
    client.close()
    assert live.engine.wait_idle()
    assert list(live.engine.finished.values()) == ["abort"]
    assert live.engine.num_steps <= 3


def test_a_storm_of_leaving_clients(make_api, go_live) -> None:
    live = go_live(make_api([100] * 500, delay_s=0.002))
    for number in range(60):
        client = live.connect(COMPLETIONS, {"prompt": "x", "max_tokens": 400, "stream": number % 2 == 0})
        time.sleep(0.001 * (number % 5))
        client.close()
    assert live.engine.wait_idle()
    answer = httpx.post(live.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert wait_for(lambda: live.service.runs.num_open == 0)


def test_a_client_that_does_not_read_holds_up_nobody(make_api, go_live) -> None:
    live = go_live(make_api([100] * 4000, burst=50))
    slow = live.connect(COMPLETIONS, {"prompt": "x", "max_tokens": 4000, "stream": True, "logprobs": 20})
    start = time.monotonic()
    for _ in range(5):
        assert httpx.post(live.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 100}).status_code == 200
    assert time.monotonic() - start < 5
    assert live.engine.wait_idle()
    slow.close()
    assert wait_for(lambda: live.service.runs.num_open == 0)


def test_keep_alive_serves_on_after_answers_and_errors(make_api, go_live) -> None:
    live = go_live(make_api("Hello"))
    with httpx.Client(base_url=live.url) as client:
        for _ in range(3):
            assert client.post(COMPLETIONS, json={"prompt": "x"}).json()["choices"][0]["text"] == "Hello"
            assert client.post(COMPLETIONS, json={"prompt": ""}).status_code == 400
            assert client.post(COMPLETIONS, json={"prompt": "x", "stream": True}).text.endswith("data: [DONE]\n\n")


def test_a_dying_engine_ends_streams_with_an_error(make_api, go_live) -> None:
    live = go_live(make_api([100] * 4000, delay_s=0.01))
    with httpx.stream("POST", live.url + COMPLETIONS, json={"prompt": "x", "stream": True}, timeout=10) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        live.engine.is_alive = False
        last = [line for line in lines if line][-1]
    assert (
        json.loads(last.removeprefix("data: "))["error"]["message"] == "the generation failed: the engine has stopped"
    )
    assert httpx.get(live.url + "/health").status_code == 503
    refused = httpx.post(live.url + COMPLETIONS, json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    live.engine.is_alive = True
    assert httpx.get(live.url + "/health").status_code == 200


def test_status_endpoints(api) -> None:
    assert api.ask("GET", "/health").status_code == 200
    assert api.ask("GET", "/ready").status_code == 200
    cards = api.ask("GET", "/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("rorqual-test", 4096), ("alias", 4096)]
    api.engine.is_ready = False
    assert (api.ask("GET", "/health").status_code, api.ask("GET", "/ready").status_code) == (200, 503)
    assert COMPLETIONS in api.ask("GET", "/openapi.json").json()["paths"]


def test_long_prompts_do_not_slow_other_streams(make_api, go_live) -> None:
    """Streams go on while 20 MB prompts are refused: the longest silence stays a small multiple of a step."""
    live = go_live(make_api([100] * 4000, delay_s=0.02))
    gaps: list[float] = []

    def watch() -> None:
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=30) as response:
            last = time.monotonic()
            for line in response.iter_lines():
                if line:
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

    watcher = threading.Thread(target=watch)
    watcher.start()
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 4_000_000}]}).encode()
    for _ in range(5):
        refused = httpx.post(live.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=30)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    watcher.join()
    assert len(gaps) > 90
    assert sorted(gaps)[-3] < 0.3  # generous: the machine that runs the tests may be busy


SERVER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("scripted", Path(sys.argv[1]) / "conftest.py")
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)
from rorqual.serve.api.app import create_app
from rorqual.serve.api.server import serve
from rorqual.serve.api.service import ServerInfo
from rorqual.serve.limits import Limits
from rorqual.serve.text.plane import TextPlane
limits = Limits(512, 4096, max_rows=8, max_step_tokens=64, page_size=16)
engine = scripted.ScriptedEngine(limits, lambda prompt, params: [70] * 4000, delay_s=0.02)
text = TextPlane.from_dir(Path(sys.argv[1]).parent / "golden" / "tiny")
serve(create_app(engine, text, ServerInfo(("m",))), "127.0.0.1", 0, drain_timeout_s=float(sys.argv[2]))
print("left")
"""


@pytest.fixture
def spawn(request) -> Iterator[Callable[[float], tuple[subprocess.Popen, str]]]:
    processes: list[subprocess.Popen] = []

    def start(drain_timeout_s: float) -> tuple[subprocess.Popen, str]:
        folder = Path(__file__).parents[1]
        command = [sys.executable, "-c", SERVER, str(folder), str(drain_timeout_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(process)
        for line in process.stdout:
            found = re.search(r"http://127.0.0.1:(\d+)", line)
            if found:
                return process, found[0]
        raise AssertionError("the server did not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_sigterm_lets_running_streams_finish(spawn) -> None:
    process, url = spawn(20)
    body = {"prompt": "x", "max_tokens": 60, "stream": True}
    with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGTERM)
        assert wait_for(lambda: httpx.get(url + "/ready").status_code == 503)
        assert httpx.get(url + "/ready").json() == {"status": "draining"}
        refused = httpx.post(url + COMPLETIONS, json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 60  # 59 tokens more, the last with the finish reason, and [DONE]
    assert process.wait(timeout=10) == 0
    assert "left" in process.stdout.read()


def test_sigterm_ends_what_takes_too_long(spawn) -> None:
    process, url = spawn(0.5)
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"].endswith("the server is shutting down")
    assert process.wait(timeout=10) == 0
    assert time.monotonic() - start < 5


def test_sigterm_when_idle(spawn) -> None:
    process, url = spawn(20)
    with httpx.Client(base_url=url) as client:
        assert client.get("/ready").status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=5) == 0
