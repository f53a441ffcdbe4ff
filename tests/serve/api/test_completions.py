import asyncio
from dataclasses import replace

import pytest

PATH = "/v1/completions"
TEXT = "café 你好 🙂🙂 가나"


@pytest.mark.parametrize("burst", [1, 2, 3, 5])
def test_stream_equals_whole_and_never_cuts_a_character(make_api, tiny_text, burst: int) -> None:
    for api in (make_api(TEXT, burst=burst), make_api(TEXT, tiny_text, burst=burst, vocab_size=512)):
        whole = api.post(PATH, prompt="x").json()
        chunks = api.stream(PATH, prompt="x")
        assert whole["choices"][0]["text"] == TEXT == "".join(c["choices"][0]["text"] for c in chunks)
        assert not any("\ufffd" in c["choices"][0]["text"] for c in chunks)
        assert whole["choices"][0]["finish_reason"] == "stop" == chunks[-1]["choices"][0]["finish_reason"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert len({c["id"] for c in chunks}) == 1


def test_a_cut_character_is_flushed_once_and_counted(make_api, tiny_text) -> None:
    ids = tiny_text.tokenizer.encode("ab🙂")
    api = make_api(ids, tiny_text, vocab_size=512)
    body = {"prompt": "x", "max_tokens": len(ids) - 1}
    whole = api.post(PATH, **body).json()
    assert whole["choices"][0]["text"] == "ab\ufffd"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == len(ids) - 1
    assert "".join(c["choices"][0]["text"] for c in api.stream(PATH, **body)) == "ab\ufffd"


def test_only_a_complete_stop_string_cuts(make_api) -> None:
    api = make_api("one\ntwo\n\nEND")
    body = {"prompt": "x", "stop": ["END\nXX", "\n<eot>"], "max_tokens": 50}
    assert api.post(PATH, **body).json()["choices"][0]["text"] == "one\ntwo\n\nEND"
    assert "".join(c["choices"][0]["text"] for c in api.stream(PATH, **body)) == "one\ntwo\n\nEND"


@pytest.mark.parametrize("burst", [1, 4])
def test_a_stop_string_ends_the_answer_and_the_request(make_api, burst: int) -> None:
    api = make_api("alpha beta gamma delta epsilon" * 50, burst=burst, delay_s=0.002)
    body = {"prompt": "x", "stop": "a gam", "max_tokens": 300}
    whole = api.post(PATH, **body).json()
    assert whole["choices"][0]["text"] == "alpha bet"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert 3 <= whole["usage"]["completion_tokens"] <= 8
    assert "".join(c["choices"][0]["text"] for c in api.stream(PATH, **body)) == "alpha bet"
    assert api.engine.wait_idle()
    assert set(api.engine.finished.values()) == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_four_forms_of_a_prompt(make_api, stream: bool) -> None:
    api = make_api()
    ids = api.text.tokenizer.encode("The capital")
    for prompt, count in (("The capital", 1), (["The capital"] * 2, 2), (ids, 1), ([ids, ids, ids], 3)):
        api.engine.prompts.clear()
        if stream:
            chunks = api.stream(PATH, prompt=prompt, stream_options={"include_usage": True})
            usage = chunks[-1]["usage"]
            texts = dict.fromkeys(range(count), "")
            for chunk in chunks[:-1]:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        else:
            answer = api.post(PATH, prompt=prompt).json()
            usage, texts = answer["usage"], {c["index"]: c["text"] for c in answer["choices"]}
        assert texts == dict.fromkeys(range(count), "Hello there")
        assert api.engine.prompts == [ids] * count
        assert usage["prompt_tokens"] == count * len(ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_usage_chunk_only_where_it_is_asked_for(make_api) -> None:
    api = make_api(cached=1)
    plain = api.stream(PATH, prompt="a b c")
    assert not any("usage" in chunk for chunk in plain)
    chunks = api.stream(PATH, prompt="a b c", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == api.post(PATH, prompt="a b c").json()["usage"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("burst", [1, 4])
def test_logprobs_are_the_same_streamed_and_whole(make_api, tiny_text, burst: int) -> None:
    api = make_api("a你🙂b", tiny_text, vocab_size=512, burst=burst)
    body = {"prompt": "x", "logprobs": 5, "temperature": 0}
    whole = api.post(PATH, **body).json()["choices"][0]["logprobs"]
    joined: dict[str, list] = {name: [] for name in whole}
    for chunk in api.stream(PATH, **body):
        for name, column in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += column
    assert joined == whole
    ids = tiny_text.tokenizer.encode("a你🙂b")
    assert len(whole["tokens"]) == len(ids)
    raw = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", "")) if t.startswith("bytes:") else t.encode()
        for t in whole["tokens"]
    )
    assert raw.decode() == "a你🙂b"
    assert all(len(top) == 5 for top in whole["top_logprobs"])
    assert whole["token_logprobs"] == [-0.25 - i % 7 for i in ids]
    assert whole["text_offset"][0] == 0 and whole["text_offset"][-1] == 3


def test_no_alternatives_and_no_logprobs(api) -> None:
    assert api.post(PATH, prompt="x", logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}]
    assert api.post(PATH, prompt="x").json()["choices"][0]["logprobs"] is None


def test_sampling_fields_reach_the_engine(api) -> None:
    stated = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": 42,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    assert api.post(PATH, prompt="x", max_tokens=2, stop="zz", stop_token_ids=[9], logit_bias={"5": -3}, **stated)
    params = api.engine.params[-1]
    assert {name: getattr(params, name) for name in stated} == stated
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("zz",), (9,), ((5, -3),))
    api.post(PATH, prompt="x", top_k=-1, temperature=None)
    assert (api.engine.params[-1].top_k, api.engine.params[-1].temperature) == (0, 1.0)


def test_checkpoint_defaults_give_way_to_stated_values(make_api, real_text) -> None:
    api = make_api("ok", replace(real_text, sampling_defaults={"temperature": 0.6, "top_p": 0.9}))
    api.post(PATH, prompt="x", top_p=0.5)
    assert (api.engine.params[-1].temperature, api.engine.params[-1].top_p) == (0.6, 0.5)


def test_text_of_a_prompt_is_plain_text(api) -> None:
    assert api.post(PATH, prompt="x<｜Assistant｜></think><｜deepseek_image｜>").status_code == 200
    assert max(api.engine.prompts[-1]) < 128000


def test_many_requests_at_once(make_api) -> None:
    api = make_api("one two three four five", delay_s=0.001)

    async def crowd() -> list:
        return await asyncio.gather(*(api.ask_async("POST", PATH, json={"prompt": "x"}) for _ in range(40)))

    assert {r.json()["choices"][0]["text"] for r in asyncio.run(crowd())} == {"one two three four five"}
    assert api.app.state.service.runs.num_open == 0
