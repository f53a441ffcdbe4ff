"""POST /v1/completions: plain text or token ids in, text out."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from rorqual.serve.api.intake import completion_prompts, sampling_params, stated_max_tokens, with_usage
from rorqual.serve.api.service import Service, check_finish
from rorqual.serve.request import SamplingParams, check_request
from rorqual.serve.text.logprobs import completion_logprobs
from rorqual.serve.text.text_stream import Finish, TextDelta, TextStream, TextToken


class CompletionAnswer:
    """One completions request of one or more prompts; `chunks` and `whole` give the same text."""

    renamed: dict[str, str] = {}

    def __init__(self, service: Service, values: dict[str, Any], model: str) -> None:
        self._service = service
        self._prompts = completion_prompts(values.get("prompt"), service.info.max_prompts)
        _, max_tokens = stated_max_tokens(values)
        defaults = service.text.sampling_defaults
        self._params: SamplingParams = sampling_params(values, defaults, max_tokens, values.get("logprobs"))
        self._with_usage = with_usage(values)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def chunks(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Stream objects, the usage chunk last where it is asked for."""
        finishes: list[Finish] = []
        async with aclosing(self._deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield None
                    continue
                number, delta = item
                if delta.finish is not None:
                    finishes.append(delta.finish)
                if delta.text or delta.finish or (delta.tokens and self._params.logprobs is not None):
                    reason = delta.finish.reason if delta.finish else None
                    yield self._object([self._choice(number, delta.text, delta.tokens, reason)], None)
        if self._with_usage:
            yield self._object([], _usage(finishes))

    async def whole(self) -> dict[str, Any]:
        """The complete response object."""
        texts: list[list[str]] = [[] for _ in self._prompts]
        tokens: list[list[TextToken]] = [[] for _ in self._prompts]
        finishes: dict[int, Finish] = {}
        async with aclosing(self._deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    number, delta = item
                    texts[number].append(delta.text)
                    tokens[number] += delta.tokens
                    if delta.finish is not None:
                        finishes[number] = delta.finish
        choices = [
            self._choice(number, "".join(texts[number]), tokens[number], finishes[number].reason)
            for number in range(len(self._prompts))
        ]
        return {**self._head, "choices": choices, "usage": _usage(list(finishes.values()))}

    async def _deltas(self) -> AsyncGenerator[tuple[int, TextDelta] | None, None]:
        """None once the engine has taken the requests, then number and delta of a prompt."""
        service = self._service
        prompts = await self._encoded()
        # All are judged before the engine sees the first, so that a refused batch costs it nothing.
        checked = [check_request(prompt, self._params, service.engine.limits) for prompt in prompts]
        streams = [TextStream(service.text.tokenizer, self._params) for _ in checked]
        with service.runs.submitted([(prompt, self._params) for prompt in checked]) as batch:
            yield None
            async for number, events in batch.arrivals():
                delta = streams[number].feed(events)
                if delta.cut:
                    batch.finish(number, "stop")
                if delta.finish is not None:
                    check_finish(delta.finish)
                yield number, delta

    async def _encoded(self) -> Sequence[np.ndarray | list[int]]:
        texts = [prompt for prompt in self._prompts if isinstance(prompt, str)]
        ids = [prompt for prompt in self._prompts if not isinstance(prompt, str)]
        return await self._service.encode(texts) if texts else ids

    def _choice(self, number: int, text: str, tokens: Sequence[TextToken], reason: str | None) -> dict[str, Any]:
        asked = self._params.logprobs is not None
        logprobs = completion_logprobs(self._service.text.tokenizer, tokens) if asked else None
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _object(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        extra = {"usage": usage} if self._with_usage else {}
        return {**self._head, "choices": choices, **extra}


def _usage(finishes: Sequence[Finish]) -> dict[str, Any]:
    prompt = sum(finish.num_prompt for finish in finishes)
    generated = sum(finish.num_generated for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(finish.num_cached for finish in finishes)},
    }
