"""Every refusal is a 4xx in the OpenAI error shape that names field, found and allowed, and leaves the engine alone."""

import asyncio
import json

import pytest

from rorqual.serve.api.fields import CHAT_FIELDS, COMPLETION_FIELDS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Say hi."}]


def refusal(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 10_000
    assert "Traceback" not in response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


SAMPLING = [
    ("temperature", -1, "-1, allowed a number 0.0..100.0"),
    ("temperature", 999999, "999999, allowed a number 0.0..100.0"),
    ("temperature", "hot", "a string, allowed a number"),
    ("temperature", True, "a boolean, allowed a number"),
    ("top_p", -1, "-1, allowed a number above 0.0 up to 1.0"),
    ("top_p", 0, "0, allowed a number above 0.0 up to 1.0"),
    ("top_p", 1.5, "1.5, allowed a number above 0.0 up to 1.0"),
    ("top_k", -5, "-5, allowed an integer 0.."),
    ("min_p", 2, "2, allowed a number 0.0..1.0"),
    ("repetition_penalty", 0, "0, allowed a number 0.01..10.0"),
    ("presence_penalty", 3, "3, allowed a number -2.0..2.0"),
    ("frequency_penalty", -3, "-3, allowed a number -2.0..2.0"),
    ("max_tokens", -1, "-1, allowed an integer 1..40"),
    ("max_tokens", 0, "0, allowed an integer 1..40"),
    ("max_tokens", 10**9, "1000000000, allowed an integer 1..40"),
    ("max_tokens", 5.5, "a number, allowed an integer"),
    ("max_tokens", 10**80, "an integer of 266 bits, allowed an integer 1..40"),
    ("min_tokens", -1, "-1, allowed an integer 0.."),
    ("seed", 2**70, f"{2**70}, allowed an integer 0..9223372036854775807"),
    ("stop", ["x"] * 1000, "1000 entries, allowed at most 16"),
    ("stop", "x" * 1_000_000, "a string of 1000000 characters, allowed 1..1024"),
    ("stop", [""], "a string of 0 characters, allowed 1..1024"),
    ("stop", ["a\ud800"], "a lone surrogate, allowed Unicode text"),
    ("stop", [1], "a list, allowed a string or a list of strings"),
    ("stop_token_ids", [-1], "-1, allowed an integer 0..129279"),
    ("stop_token_ids", "x", "a string, allowed a list of integers"),
    ("logit_bias", {"99999999": 5}, "99999999, allowed an integer 0..129279"),
    ("logit_bias", {"-1": 5}, "-1, allowed an integer 0..129279"),
    ("logit_bias", {"word": 5}, "the key 'word', allowed token ids as keys"),
    ("logit_bias", {"5": 1e9}, "1000000000.0, allowed a number -100.0..100.0"),
    ("logit_bias", {"5": "x"}, "'x', allowed a number -100.0..100.0"),
    ("logit_bias", [1], "a list, allowed an object"),
    ("n", 5_000_000, "5000000 is not supported, allowed null or 1"),
    ("n", 3, "3 is not supported, allowed null or 1"),
    ("stream", "yes", "a string, allowed true or false"),
    ("stream_options", {"include_usage": True}, "given without stream, allowed only with stream true"),
    ("response_format", {"type": "json_object"}, 'an object is not supported, allowed null or {"type": "text"}'),
    ("ignore_eos", 1, "an integer, allowed true or false"),
    ("echo", True, "true is not supported, allowed null or false"),
    ("best_of", 2, "2 is not supported, allowed null or 1"),
    ("prompt_logprobs", 129280, "129280 is not supported, allowed null"),
    ("model", "nope", "'nope', allowed 'rorqual-test' or 'alias'"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value", "message"), SAMPLING)
def test_sampling_values(api, path: str, field: str, value, message: str) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    error = refusal(api.raw(path, json.dumps({**prompt, field: value})))
    assert error["message"].startswith(f"{field}: {message}")
    assert error["param"] == field
    assert api.engine.prompts == []
    assert api.post(path, **prompt).status_code == 200


IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
CHAT_ONLY = [
    ({"messages": []}, "messages", "an empty list, allowed a list of 1 message and more"),
    ({}, "messages", "NoneType, allowed a list of 1 message and more"),
    ({"messages": "x"}, "messages", "a string, allowed a list"),
    ({"messages": [{"role": "user"}]}, "messages", "missing field `content`"),
    ({"messages": [{"role": "user", "content": [{"type": "nope"}]}] * 2000}, "messages", "unknown variant `nope`"),
    ({"messages": [{"role": "user", "content": [{"type": "x" * 50_000}]}]}, "messages", "unknown variant `xxx"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "images are not supported: 1 of them"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "a lone surrogate, allowed Unicode text"),
    ({"top_logprobs": 1000000000, "logprobs": True}, "top_logprobs", "1000000000, allowed 0 to 20"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "-1, allowed 0 to 20"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "21, allowed 0 to 20"),
    ({"top_logprobs": 5}, "top_logprobs", "5 without logprobs, allowed with logprobs true"),
    ({"logprobs": 5}, "logprobs", "an integer, allowed true or false"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0, allowed an integer 1..40"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "5, allowed the same as max_tokens (6)"),
    ({"max_tokens": 4090}, "max_tokens", "4090, allowed an integer 1.."),
    ({"tools": [{"type": "function"}]}, "tools", "a list is not supported, allowed null or []"),
    ({"tool_choice": "required"}, "tool_choice", '"required" is not supported'),
    ({"reasoning_effort": "ultra"}, "reasoning_effort", "'ultra', allowed none, minimal, low, medium, high, "),
    ({"reasoning_effort": 37}, "reasoning_effort", "an integer, allowed a string"),
    ({"thinking": {"type": "zzz"}}, "thinking", "type 'zzz', allowed type enabled, disabled, adaptive"),
    ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs", "an object is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "message"), CHAT_ONLY)
def test_chat_bodies(api, body: dict, field: str, message: str) -> None:
    body = body if "messages" in body or not body else {"messages": USER, **body}
    error = refusal(api.ask("POST", CHAT, content=json.dumps(body), headers={"content-type": "application/json"}))
    assert message in error["message"] and error["message"].startswith(f"{field}: ")
    assert error["param"] == field
    assert api.engine.prompts == []


@pytest.mark.parametrize("top", [0, 20])
def test_the_limits_themselves_are_allowed(api, top: int) -> None:
    assert api.post(CHAT, messages=USER, logprobs=True, top_logprobs=top).status_code == 200
    assert api.post(COMPLETIONS, prompt="x", logprobs=top).status_code == 200


PROMPTS = [
    ([[-1]], "token id -1, allowed 0..129279"),
    ([-1], "token id -1, allowed 0..129279"),
    ([[129280]], "token id 129280, allowed 0..129279"),
    ([[2**40]], f"token id {2**40}, allowed 0..129279"),
    ([[2**80]], f"token id {2**80}, allowed 0..129279"),
    ([129264], "token id 129264 at position 0, allowed any id but the image placeholder"),
    ([], "an empty list, allowed a text or a list of 1 element and more"),
    ([[]], "an empty list of token ids (0 tokens), allowed prompts of 1 token and more"),
    ("", "an empty text (0 tokens), allowed prompts of 1 token and more"),
    ([""], "an empty text (0 tokens), allowed prompts of 1 token and more"),
    (None, "missing, allowed a text or a list"),
    (5, "an integer, allowed a text or a list"),
    ({"a": 1}, "an object, allowed a text or a list"),
    (["a", 1], "a list with a string and an integer in it, allowed a list of only texts"),
    ([[1], "a"], "a list with a list and a string in it, allowed a list of only texts"),
    ([1.5], "a list with a number in it, allowed"),
    ([True], "a list with a boolean in it, allowed"),
    ([[True]], "an element of type bool, allowed integer token ids"),
    ([["a"]], "an element of type str, allowed integer token ids"),
    ([[1], [-1]], "token id -1, allowed 0..129279"),
    ("\ud800", "lone surrogate U+D800 at character 0, allowed Unicode text"),
    (["x"] * 129, "129 prompts, allowed 1 to 128 prompts"),
    ([5] * 4096, "4096 tokens, allowed 1..4095 tokens"),
    ("word " * 5000, "5001 tokens, allowed 1 to 4095 tokens"),
    ("word " * 4_000_000, "at least 156250 tokens, allowed 1 to 4095 tokens"),
    ("a" * 5_000_000, "at least 39063 tokens, allowed 1 to 4095 tokens"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts(api, prompt, message: str, stream: bool) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "stream": stream})
    error = refusal(api.raw(COMPLETIONS, body))
    assert error["message"].startswith(f"prompt: {message}")
    assert error["param"] == "prompt"
    assert api.engine.prompts == []


@pytest.mark.parametrize("text", ["word " * 4_000_000, "a" * 5_000_000, "word " * 5000])
def test_long_conversations(api, text: str) -> None:
    error = refusal(api.post(CHAT, messages=[{"role": "user", "content": text}]))
    assert error["message"].startswith("messages: ") and error["message"].endswith("allowed 1 to 4095 tokens")
    assert error["code"] == "context_length_exceeded"


BODIES = [
    (b"[]", "body: an array, allowed a JSON object"),
    (b'"x"', "body: a string, allowed a JSON object"),
    (b"null", "body: null, allowed a JSON object"),
    (b"5", "body: a number, allowed a JSON object"),
    (b"", "body: empty, allowed a JSON object"),
    (b'{"prompt": ', "body: not JSON"),
    (b'{"prompt": "x", "temperature": NaN}', "body: not JSON (NaN is no JSON number)"),
    (b'{"prompt": "x", "temperature": -Infinity}', "body: not JSON (-Infinity is no JSON number)"),
    (b'{"prompt": "x", "prompt": "y"}', "body: the key 'prompt' twice in one object, allowed once"),
    (b'{"prompt": "\xff"}', "body: not UTF-8 at byte 12"),
    (b"[" * 200_000, "body: not JSON that can be read (nested too deeply)"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "body: not JSON that can be read (a number with too many digits)"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("body", "message"), BODIES)
def test_bodies_that_are_no_json_object(api, path: str, body: bytes, message: str) -> None:
    assert refusal(api.raw(path, body))["message"].startswith(message)


def test_overflowing_numbers_do_not_reach_the_sampler(api) -> None:
    error = refusal(api.raw(COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}'))
    assert error["message"] == "temperature: inf, allowed a number 0.0..100.0"
    error = refusal(api.raw(COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": 1e999}}'))
    assert error["message"] == "logit_bias: inf, allowed a number -100.0..100.0"


def test_content_type_size_and_path(make_api) -> None:
    api = make_api(info={"max_body_bytes": 1000})
    assert "text/plain" in refusal(api.raw(CHAT, "{}", "text/plain"), 415)["message"]
    error = refusal(api.post(COMPLETIONS, prompt="x" * 2000), 413)
    assert error["message"].endswith("allowed at most 1000 bytes")
    assert refusal(api.ask("GET", "/nope"), 404)["message"] == "GET /nope: Not Found"
    assert refusal(api.ask("GET", CHAT), 405)
    assert api.raw(COMPLETIONS, '{"prompt": "x"}', "application/json; charset=utf-8").status_code == 200


def test_unknown_fields_are_ignored_and_named(api, caplog) -> None:
    extra = {"zig": 1, "bootstrap_room": 5, "x\r\nevil: 1": 2}
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        caplog.clear()
        for _ in range(2):
            response = api.post(path, **prompt, **extra)
            assert response.status_code == 200
            assert response.headers["x-rorqual-ignored-fields"] == "zig,bootstrap_room,x%0D%0Aevil%3A%201"
        assert sum("zig" in record.getMessage() for record in caplog.records) == 1
        assert "x-rorqual-ignored-fields" not in api.post(path, **prompt).headers
        assert refusal(api.post(path, **prompt, zig=1, n=2))
        response = api.post(path, **prompt, zig=1, stream=True)
        assert response.headers["x-rorqual-ignored-fields"] == "zig"


def test_fields_that_gateways_add_pass(api) -> None:
    added = {
        "max_completion_tokens": 5,
        "no_stop_trim": False,
        "ignore_eos": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "skip_special_tokens": True,
        "continue_final_message": False,
        "stop_token_ids": None,
        "regex": None,
        "lora_path": None,
        "top_k": -1,
        "min_p": 0.0,
        "n": 1,
        "tool_choice": "auto",
        "tools": None,
        "parallel_tool_calls": True,
        "logprobs": False,
        "top_logprobs": None,
        "user": None,
        "bootstrap_host": "a",
        "bootstrap_port": 1,
        "bootstrap_room": 2**62,
    }
    response = api.post(CHAT, model="rorqual-test", messages=USER, **added)
    assert response.status_code == 200, response.text
    assert response.headers["x-rorqual-ignored-fields"] == "bootstrap_host,bootstrap_port,bootstrap_room"
    assert api.engine.params[-1].max_tokens == 5


def test_one_bad_request_leaves_the_others_alone(make_api) -> None:
    api = make_api("one two three", delay_s=0.01)

    async def mixed() -> list:
        good = [api.ask_async("POST", COMPLETIONS, json={"prompt": "x"}) for _ in range(8)]
        bad = [api.ask_async("POST", COMPLETIONS, json={"prompt": [[5], [-1]]}) for _ in range(8)]
        return await asyncio.gather(*good, *bad)

    answers = asyncio.run(mixed())
    assert [r.status_code for r in answers] == [200] * 8 + [400] * 8
    assert len(api.engine.prompts) == 8


WEIRD = [
    None,
    True,
    0,
    -1,
    2**64,
    1e308,
    "",
    "\ud800",
    "x" * 3000,
    [],
    [[]],
    [None],
    {},
    {"a": {"b": []}},
    [{"role": 5}],
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_value_of_any_field_breaks_the_server(api, path: str) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    for name in COMPLETION_FIELDS if path == COMPLETIONS else CHAT_FIELDS:
        for value in WEIRD:
            response = api.raw(path, json.dumps({**prompt, "max_tokens": 1, name: value}))
            assert response.status_code in (200, 400), (name, value, response.text)
            assert len(response.content) < 10_000
