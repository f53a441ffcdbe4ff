"""Reasoning tokens of a chat answer: the generated tokens before the end of thinking, whatever their bytes."""

import random

import pytest

from rorqual.serve.request import Finished, SamplingParams, Token
from rorqual.serve.text.chat_stream import ChatStream

MESSAGES = [{"role": "user", "content": "Hi"}]


def num_reasoning(plane, ids: list[int], **body) -> int:
    prompt = plane.chat.prompt({"model": "m", "messages": MESSAGES, **body}, 4000)
    stream = ChatStream(plane.chat, prompt, SamplingParams(), "id", "m")
    for token in ids:
        stream.feed([Token(0, token)])
    finish = stream.feed([Finished(0, "length", len(prompt.ids), len(ids), 0)]).finish
    details = stream.usage(finish)["completion_tokens_details"]
    return details["reasoning_tokens"]


@pytest.mark.parametrize("seed", range(4))
def test_noise_counts_each_token_once(real_text, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(3, 128000) for _ in range(40)]
    assert num_reasoning(real_text, ids) == 40
    assert num_reasoning(real_text, ids, thinking={"type": "disabled"}) == 0


def test_the_mark_and_what_follows_do_not_count(real_text):
    end = real_text.tokenizer.token_id("</think>")
    words = real_text.tokenizer.encode("alpha beta gamma")
    assert num_reasoning(real_text, [*words, end, *words, *words]) == len(words)
    assert num_reasoning(real_text, [end, *words]) == 0
