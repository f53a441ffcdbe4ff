"""Offline use: order, errors by item, streaming, stop strings, scoring, options."""

import asyncio
import gc
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rorqual.serve import LLM, SamplingParams
from rorqual.serve.completion import Collector
from rorqual.serve.options import EngineOptions, OptionError
from rorqual.serve.request import RequestError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
GOOD = [5, 6, 7]


def test_answers_come_in_the_order_of_the_prompts(tiled_llm: LLM):
    prompts = [[2 + i] * (1 + 9 * (i % 4)) for i in range(20)]
    params = [replace(GREEDY, max_tokens=1 + i % 7) for i in range(20)]
    together = tiled_llm.generate(prompts, params)
    assert together == [tiled_llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [len(answer.token_ids) for answer in together] == [1 + i % 7 for i in range(20)]


def test_usage_and_finish_reason(tiny_llm: LLM):
    [answer] = tiny_llm.generate([GOOD], GREEDY)
    assert (answer.usage.num_prompt, answer.usage.num_generated, answer.usage.num_cached) == (3, 12, 0)
    assert answer.finish_reason == "length" and answer.error is None and answer.logprobs is None


def test_a_text_is_the_same_as_its_ids(tiny_llm: LLM):
    text = "the whale"
    ids = tiny_llm.text.tokenizer.encode_prompt(text)
    by_text, by_ids = tiny_llm.generate([text, ids], GREEDY)
    assert by_text == by_ids


BAD = {
    "empty prompt": ([], GREEDY, ("0 tokens", "1..511")),
    "empty text": ("", GREEDY, ("0 tokens", "1..511")),
    "prompt beyond the context": ([5] * 512, GREEDY, ("512 tokens", "1..511")),
    "negative id": ([5, -1], GREEDY, ("-1", "0..511")),
    "id out of range": ([5, 512], GREEDY, ("512", "0..511")),
    "image placeholder": ([5, 510], GREEDY, ("510", "position 1")),
    "no tokens wanted": (GOOD, replace(GREEDY, max_tokens=0), ("max_tokens", "0", "1..")),
    "more tokens than the context": (GOOD, replace(GREEDY, max_tokens=510), ("max_tokens", "510", "509")),
    "temperature below zero": (GOOD, replace(GREEDY, temperature=-1), ("temperature", "-1", "0.0..100.0")),
    "temperature no number": (GOOD, replace(GREEDY, temperature=math.nan), ("temperature", "nan", "0.0..100.0")),
    "top_p zero": (GOOD, replace(GREEDY, top_p=0.0), ("top_p", "0.0", "1.0")),
    "top_k negative": (GOOD, replace(GREEDY, top_k=-5), ("top_k", "-5", "0..")),
    "min_p above one": (GOOD, replace(GREEDY, min_p=1.5), ("min_p", "1.5", "0.0..1.0")),
    "penalty infinite": (GOOD, replace(GREEDY, presence_penalty=math.inf), ("presence_penalty", "inf", "-2.0..2.0")),
    "seed too large": (GOOD, replace(GREEDY, seed=2**70), ("seed", str(2**70), str(2**63 - 1))),
    "bias outside the vocabulary": (GOOD, replace(GREEDY, logit_bias={600: 1.0}), ("logit_bias", "600", "0..511")),
    "too many alternatives": (GOOD, replace(GREEDY, logprobs=21), ("logprobs", "21", "0..20")),
    "wrong type": (GOOD, replace(GREEDY, top_k="5"), ("top_k", "'5'", "integer")),
    "no prompt at all": (None, GREEDY, ("prompt", "None", "token ids")),
}


def test_a_bad_item_is_an_error_that_names_the_numbers_and_the_others_go_on(tiled_llm: LLM):
    [good] = tiled_llm.generate([GOOD], GREEDY)
    prompts, params = [GOOD], [GREEDY]
    for prompt, one, _ in BAD.values():
        prompts += [prompt, GOOD]
        params += [one, GREEDY]
    answers = tiled_llm.generate(prompts, params)
    assert all(answer == good for answer in answers[0::2])
    for (kind, (_, _, wanted)), answer in zip(BAD.items(), answers[1::2], strict=True):
        print(f"{kind}: {answer.error}")
        assert answer.finish_reason == "error" and answer.token_ids == ()
        assert all(part in (answer.error or "") for part in wanted), (kind, answer.error)


def test_calls_that_make_no_sense_are_refused_whole(tiny_llm: LLM):
    with pytest.raises(TypeError, match="prompts: str, allowed a list"):
        tiny_llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="params: 2, allowed one or as many as prompts = 1"):
        tiny_llm.generate([GOOD], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt: token id 999, allowed 0..511"):
        tiny_llm.stream([GOOD, [999]], GREEDY)


def test_a_stream_brings_what_generate_gives(tiled_llm: LLM):
    prompts = [GOOD, "the whale", [9] * 40]
    params = replace(GREEDY, logprobs=3)
    collectors = [Collector(True) for _ in prompts]
    pieces = 0
    for delta in tiled_llm.stream(prompts, params):
        collectors[delta.index].add(delta)
        pieces += 1
    assert [collector.completion for collector in collectors] == tiled_llm.generate(prompts, params)
    assert pieces > len(prompts)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_left_early_frees_its_rows(tiny_llm: LLM, how):
    engine = tiny_llm.engine
    free = engine.num_free_pages
    stream = tiny_llm.stream([GOOD] * 12, replace(GREEDY, max_tokens=400))
    next(stream)
    if how == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    deadline = time.monotonic() + 5
    while (engine.num_free_pages != free or engine.num_live) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.num_free_pages == free and engine.num_live == 0


def test_a_stop_string_cuts_across_tokens(tiny_llm: LLM):
    whole = tiny_llm.generate([GOOD], replace(GREEDY, max_tokens=30))[0]
    tokenizer = tiny_llm.text.tokenizer
    ends = [len(tokenizer.decode(whole.token_ids[:n])) for n in range(1, 31)]
    middle = next(end for end in ends if 4 <= end < len(whole.text) - 4)
    stop = whole.text[middle - 2 : middle + 2]
    cut = tiny_llm.generate([GOOD], replace(GREEDY, max_tokens=30, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.usage.num_generated == len(cut.token_ids) < 30


def test_scores_are_logits_of_every_position(tiny_llm: LLM, tiny):
    ids = tiny["p4.ids"].tolist()
    scores = tiny_llm.score(ids)
    assert scores.dtype == np.float32 and scores.shape == (len(ids), 512)
    for wrong in ([], [512], [5] * 513):
        with pytest.raises(RequestError, match="allowed"):
            tiny_llm.score(wrong)
    assert tiny_llm.score([5] * 512).shape == (512, 512)


def test_defaults_come_from_the_checkpoint(tiny_llm: LLM, monkeypatch):
    assert tiny_llm.default_params == SamplingParams()
    greedy_text = replace(tiny_llm.text, sampling_defaults={"temperature": 0.0, "top_p": 0.5})
    monkeypatch.setattr(tiny_llm, "text", greedy_text)
    assert tiny_llm.default_params == SamplingParams(temperature=0.0, top_p=0.5)


def test_it_works_in_threads_and_under_a_running_event_loop(tiled_llm: LLM):
    [wanted] = tiled_llm.generate([GOOD], GREEDY)
    found = []
    threads = [threading.Thread(target=lambda: found.extend(tiled_llm.generate([GOOD] * 3, GREEDY))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 9

    async def under_a_loop():
        here = tiled_llm.generate([GOOD], GREEDY)
        there = await asyncio.to_thread(tiled_llm.generate, [GOOD], GREEDY)
        return here + there

    assert asyncio.run(under_a_loop()) == [wanted, wanted]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context: 1, allowed an integer of at least 2"),
        ({"max_rows": 0}, "max_rows: 0, allowed an integer of at least 1"),
        ({"max_rows": 64, "step_tokens": 32}, "step_tokens: 32, allowed an integer of at least max_rows = 64"),
        ({"row_tile": 8}, "row_tile: 8, allowed 0 or 16"),
        ({"weights": "int3"}, "weights: 'int3', allowed auto, packed, bfloat16, float32"),
        ({"memory_share": 1.5}, "memory_share: 1.5, allowed a number above 0 up to 1"),
        ({"memory_gb": 0}, "memory_gb: 0, allowed a number above 0"),
    ],
)
def test_wrong_options_name_both_numbers(options, message):
    with pytest.raises(OptionError) as error:
        EngineOptions(**options)
    assert message in str(error.value)


def test_options_that_the_checkpoint_cannot_keep_are_refused_before_anything_is_built(tiny_dir):
    with pytest.raises(OptionError, match=r"context: 513, allowed 2..512"):
        LLM(tiny_dir, context=513)
    with pytest.raises(
        OptionError, match=r"memory: 0.030 GB, needed at least 0.0\d\d GB for one request of 512 tokens"
    ):
        LLM(tiny_dir, memory_gb=0.03, weights="float32")
    with pytest.raises(TypeError, match="contxt"):
        LLM(tiny_dir, contxt=512)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        LLM(tiny_dir / "nowhere")
