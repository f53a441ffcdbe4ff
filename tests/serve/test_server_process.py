"""The command as people use it: start it, send the request that the Makefile prints, end it under load."""

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
# The sizes of the fixture demo_llm, so that its compiled programs are found in the cache.
SIZES = ("--context", "4096", "--max-rows", "64", "--step-tokens", "256", "--memory-gb", "4")
START_TIMEOUT_S = 240


@pytest.fixture
def process(demo_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server on a free port, ready, and its address."""
    command = [
        *(Path(sysconfig.get_path("scripts")) / "rorqual", "serve", demo_dir, "--port", "0"),
        *(*SIZES, "--compile-cache", ROOT / ".cache" / "test-programs"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(r"running on (http://127.0.0.1:\d+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def printed_request() -> tuple[str, dict]:
    """Path and body of the curl line that `make run` prints."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    path = re.search(r"curl http://\$\(HOST\):\$\(PORT\)(/\S+)", text)
    body = re.search(r"-d '(\{.*\})'", text)
    assert path is not None and body is not None
    return path[1], json.loads(body[1].replace('\\"', '"'))


def test_serve_answers_and_drains(process: tuple[subprocess.Popen, str]) -> None:
    server, url = process
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        path, body = printed_request()
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert 0 < answer.json()["usage"]["completion_tokens"] <= body["max_tokens"]
        message = answer.json()["choices"][0]["message"]
        assert message["content"] + message["reasoning_content"]

        stream = {"prompt": "The whale", "max_tokens": 40, "ignore_eos": True, "stream": True, "temperature": 0}
        with client.stream("POST", "/v1/completions", json=stream) as response:
            lines = (line for line in response.iter_lines() if line)
            frames = [next(lines)]
            os.kill(server.pid, signal.SIGTERM)
            frames += lines
    assert frames[-1] == "data: [DONE]"
    last = json.loads(frames[-2].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "length"
    assert server.wait(timeout=20) == 0
