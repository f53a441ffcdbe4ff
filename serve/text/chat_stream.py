"""From engine events to chat completion chunks: reasoning apart from content, usage, log-probabilities."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from rorqual.serve.request import Finished, SamplingParams, Token
from rorqual.serve.text.chat import ChatFormat, ChatPrompt
from rorqual.serve.text.detokenize import Detokenizer
from rorqual.serve.text.logprobs import chat_logprob, finite
from rorqual.serve.text.text_stream import Finish

REPLACEMENT = "\ufffd"
THINK_START, THINK_END = "<think>", "</think>"


class ChatDelta(NamedTuple):
    """Chunks (JSON objects of the chat completions stream, without usage) that some events add.

    `cut` is True once, when a stop string was found: the caller tells the engine to finish the request as "stop".
    `finish` is set with the engine's Finished event; no chunk comes after it.
    """

    chunks: list[dict[str, Any]]
    cut: bool
    finish: Finish | None


class ChatStream:
    """Parser of one chat answer; its chunks joined do not depend on how the events are grouped.

    Tokens go to the library's processor in groups that are whole characters, since it drops a character left
    unfinished at the end. Bytes that never become a character are given to it as text, as U+FFFD.
    """

    def __init__(
        self, chat: ChatFormat, prompt: ChatPrompt, params: SamplingParams, answer_id: str, model: str
    ) -> None:
        self._tokenizer = chat.tokenizer
        self._textless = chat.textless_ids
        self._processor = chat.processor(prompt, answer_id, model, params.stop)
        self._with_logprobs = params.logprobs is not None
        self._num_prompt = len(prompt.ids)
        self._held: list[Token] = []
        self._detokenizer = Detokenizer()
        self._text = ""
        self._loose: list[dict[str, Any]] = []
        self._opened = False
        self.num_generated = 0
        self.num_reasoning = 0
        self._think_end = chat.tokenizer.token_id(THINK_END)
        self._thinks = thinking_is_open(chat, prompt.ids)

    def feed(self, events: Sequence[Token | Finished]) -> ChatDelta:
        """Take events of this request in order and return what they add to the answer."""
        already_cut = self._processor.finished
        chunks = [] if self._opened else self._open()
        finish: Finish | None = None
        for event in events:
            if isinstance(event, Finished):
                finish = self._end(event, chunks)
                break
            if not self._processor.finished:
                self._count(event.token)
                chunks += self._token(event)
        cut = self._processor.finished and not already_cut and finish is None
        return ChatDelta(chunks, cut, finish)

    def usage(self, finish: Finish) -> dict[str, Any]:
        """Token counts of the finished answer."""
        return {
            "prompt_tokens": finish.num_prompt,
            "completion_tokens": finish.num_generated,
            "total_tokens": finish.num_prompt + finish.num_generated,
            "prompt_tokens_details": {"cached_tokens": finish.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "prompt_cache_hit_tokens": finish.num_cached,
            "prompt_cache_miss_tokens": finish.num_prompt - finish.num_cached,
        }

    def _count(self, token_id: int) -> None:
        """Reasoning tokens are those before the end of thinking (the library's own count takes loose bytes double)."""
        self.num_generated += 1
        self._thinks = self._thinks and token_id != self._think_end
        self.num_reasoning += self._thinks

    def _open(self) -> list[dict[str, Any]]:
        self._opened = True
        usage = recipe.PromptUsage(prompt_tokens=self._num_prompt)
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def _token(self, token: Token) -> list[dict[str, Any]]:
        if token.token in self._textless:
            return self._push(recipe.InferenceChunk.text("", 1))
        self._held.append(token)
        self._text += self._detokenizer.feed(self._tokenizer.token_bytes(token.token))
        return [] if self._detokenizer.num_held_bytes else self._release()

    def _release(self) -> list[dict[str, Any]]:
        """Hand the held tokens, which are whole characters now, to the processor."""
        held, text = self._held, self._text
        self._held, self._text = [], ""
        if not held:
            return []
        if text and REPLACEMENT not in text:
            logprobs = (
                [(finite(t.logprob), _finite_pairs(t.alternatives)) for t in held] if self._with_logprobs else None
            )
            return self._push(recipe.InferenceChunk.tokens([t.token for t in held], logprobs))
        if self._with_logprobs:
            self._loose += [chat_logprob(self._tokenizer, t.token, t.logprob, t.alternatives) for t in held]
        return self._push(recipe.InferenceChunk.text(text, len(held)))

    def _push(self, chunk: recipe.InferenceChunk) -> list[dict[str, Any]]:
        return self._collect(self._processor.push(chunk))

    def _collect(self, produced: Sequence[Any]) -> list[dict[str, Any]]:
        chunks = [json.loads(chunk.to_json()) for chunk in produced]
        kept = []
        for chunk in chunks:
            chunk.pop("usage", None)
            choice = chunk["choices"][0]
            delta = choice["delta"]
            if self._loose and "role" not in delta:
                section = "reasoning_content" if delta.get("reasoning_content") else "content"
                logprobs = choice["logprobs"] = choice["logprobs"] or {}
                logprobs[section] = self._loose + logprobs.get(section, [])
                self._loose = []
            if "role" in delta or choice["finish_reason"] or choice["logprobs"] or any(delta.values()):
                kept.append(chunk)
        return kept

    def _end(self, event: Finished, chunks: list[dict[str, Any]]) -> Finish:
        if self._processor.finished:
            return Finish("stop", None, None, event.num_prompt, self.num_generated, event.num_cached)
        error = str(event.detail) if event.reason == "error" else None
        if event.reason in ("stop", "length"):
            self._text += self._detokenizer.flush()
            chunks += self._release()
            if not self._processor.finished:
                reasons = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}
                chunks += self._push(recipe.InferenceChunk.finish(reasons[event.reason]))
            chunks += self._collect(self._processor.finish())
        matched = event.detail if event.reason == "stop" else None
        return Finish(event.reason, matched, error, event.num_prompt, event.num_generated, event.num_cached)


def thinking_is_open(chat: ChatFormat, prompt_ids: Sequence[int]) -> bool:
    """True when the prompt ends inside a thinking section: the last mark in it is one that opens."""
    opens, closes = (chat.tokenizer.token_id(mark) for mark in (THINK_START, THINK_END))
    last = next((token for token in reversed(prompt_ids) if token in (opens, closes)), None)
    return last is not None and last == opens


def _finite_pairs(alternatives: tuple[tuple[int, float], ...] | None) -> list[tuple[int, float]]:
    return [(token_id, finite(logprob)) for token_id, logprob in alternatives or ()]


def join_chunks(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion object (without usage) that a whole stream of chunks amounts to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: dict[str, list[Any]] = {}
    finish_reason = None
    for chunk in chunks:
        choice = chunk["choices"][0]
        for name in ("content", "reasoning_content"):
            if choice["delta"].get(name) is not None:
                message[name] = message.get(name, "") + choice["delta"][name]
            if choice["logprobs"] and choice["logprobs"].get(name):
                logprobs.setdefault(name, []).extend(choice["logprobs"][name])
        finish_reason = choice["finish_reason"] or finish_reason
    first = chunks[0]
    choice = {"index": 0, "message": message, "logprobs": logprobs or None, "finish_reason": finish_reason}
    return {
        "id": first["id"],
        "object": "chat.completion",
        "created": first["created"],
        "model": first["model"],
        "choices": [choice],
    }
