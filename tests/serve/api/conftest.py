"""An HTTP client on the application itself, without a socket."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rorqual.serve.api.app import create_app
from rorqual.serve.api.service import ServerInfo

MODEL = "rorqual-test"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Api:
    """Calls one application; every call runs on an event loop of its own."""

    def __init__(self, engine, text, **info: Any) -> None:
        self.engine = engine
        self.text = text
        self.app = create_app(engine, text, ServerInfo((MODEL, "alias"), **info))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.ask_async(method, path, **options))

    async def ask_async(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
            return await client.request(method, path, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.ask("POST", path, json=body)

    def raw(self, path: str, content: bytes | str, kind: str = "application/json") -> httpx.Response:
        return self.ask("POST", path, content=content, headers={"content-type": kind})

    def stream(self, path: str, **body: Any) -> list[dict]:
        """Stream objects of a request; asserts that [DONE] ends it."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = events_of(response.text)
        assert done == "[DONE]"
        return [json.loads(event) for event in events]


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def say(text: str = "Say hi.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def make_api(make_engine, real_text) -> Callable[..., Api]:
    """An application over a scripted engine; the script is a text or token ids."""

    def make(script: Any = "Hello there", text=real_text, info: dict | None = None, **engine: Any) -> Api:
        ids = text.tokenizer.encode(script) if isinstance(script, str) else script
        return Api(make_engine(ids, **engine), text, **(info or {}))

    return make


@pytest.fixture
def api(make_api) -> Api:
    return make_api()


@pytest.fixture
def think(real_text) -> Callable[[str, str], list[int]]:
    """Token ids of an answer: reasoning, end of thinking, content."""
    tokenizer = real_text.tokenizer
    return lambda reasoning, content: [
        *tokenizer.encode(reasoning),
        tokenizer.token_id("</think>"),
        *tokenizer.encode(content),
    ]


@pytest.fixture
def chat_body() -> Callable[..., dict[str, Any]]:
    return say
