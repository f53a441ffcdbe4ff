"""The official client library reads what the server writes."""

import asyncio

import httpx
import openai
import pytest


@pytest.fixture
def make_client(make_api):
    def make(script) -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(make_api(script).app)
        http = httpx.AsyncClient(transport=transport)
        return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)

    return make


USER = [{"role": "user", "content": "Say hi."}]


async def chat(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="rorqual-test", messages=USER, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == "Hello 你好"
    assert bytes(b for entry in whole.choices[0].logprobs.content for b in entry.bytes).decode() == "Hello 你好"
    options = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="rorqual-test", messages=USER, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 你好"
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="rorqual-test", messages=USER, temperature=-1)
    assert refused.value.param == "temperature"


async def completions(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="rorqual-test", prompt=["a", "b"], logprobs=2)
    assert [choice.text for choice in whole.choices] == ["x y", "x y"]
    stream = await client.completions.create(model="rorqual-test", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "x y"
    assert [model.id async for model in client.models.list()] == ["rorqual-test", "alias"]


def test_chat(make_client, think) -> None:
    asyncio.run(chat(make_client(think("hm", "Hello 你好"))))


def test_completions(make_client) -> None:
    asyncio.run(completions(make_client("x y")))
