"""POST /v1/chat/completions: a conversation in, reasoning and content out."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np

from rorqual.serve.api.errors import ApiError
from rorqual.serve.api.intake import sampling_params, stated_max_tokens, top_logprobs, with_usage
from rorqual.serve.api.service import Service, check_finish
from rorqual.serve.request import check_request
from rorqual.serve.text.chat import ChatFormat, ChatPrompt
from rorqual.serve.text.chat_stream import ChatDelta, ChatStream, join_chunks

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "disabled", "adaptive")
PLACEHOLDER = np.zeros(1, np.int32)


class ChatAnswer:
    """One chat completions request; `chunks` and `whole` give the same answer."""

    def __init__(self, service: Service, values: dict[str, Any], model: str) -> None:
        self._service = service
        self._chat = _chat_format(service)
        self._model = model
        self._values = values
        _check_thinking(values)
        limits = service.engine.limits
        field, self._max_tokens = stated_max_tokens(values)
        self.renamed = {"logprobs": "top_logprobs", "max_tokens": field, "prompt": "messages"}
        self._logprobs = top_logprobs(values, limits)
        self._with_usage = with_usage(values)
        self._names = ("messages", "reasoning_effort", "thinking", "logprobs", "top_logprobs", "stream")

    async def chunks(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Stream objects, the usage chunk last where it is asked for."""
        extra = {"usage": None} if self._with_usage else {}
        first: dict[str, Any] = {}
        async with aclosing(self._deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield None
                    continue
                stream, delta = item
                for chunk in delta.chunks:
                    first = first or chunk
                    yield {**chunk, **extra}
                if delta.finish is not None and self._with_usage:
                    yield {**first, "choices": [], "usage": stream.usage(delta.finish)}

    async def whole(self) -> dict[str, Any]:
        """The complete response object."""
        chunks: list[dict[str, Any]] = []
        usage = None
        async with aclosing(self._deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    stream, delta = item
                    chunks += delta.chunks
                    usage = stream.usage(delta.finish) if delta.finish is not None else usage
        return {**join_chunks(chunks), "usage": usage}

    async def _deltas(self) -> AsyncGenerator[tuple[ChatStream, ChatDelta] | None, None]:
        """None once the engine has taken the request, then its deltas."""
        service, limits = self._service, self._service.engine.limits
        # Sampling is judged on a stand-in prompt first: a wrong number is no reason to encode a long conversation.
        check_request(PLACEHOLDER, sampling_params(self._values, {}, self._max_tokens, self._logprobs), limits)
        prompt = await service.off_loop(self._prompt)
        defaults = {"temperature": prompt.temperature, "top_p": prompt.top_p, **service.text.sampling_defaults}
        stated = self._max_tokens
        max_tokens = prompt.default_max_tokens(limits.max_context) if stated is None else stated
        params = sampling_params(self._values, defaults, max_tokens, self._logprobs)
        stream = ChatStream(self._chat, prompt, params, f"chatcmpl-{uuid.uuid4().hex}", self._model)
        with service.runs.submitted([(np.array(prompt.ids, np.int32), params)]) as batch:
            yield None
            async for number, events in batch.arrivals():
                delta = stream.feed(events)
                if delta.cut:
                    batch.finish(number, "stop")
                if delta.finish is not None:
                    check_finish(delta.finish)
                yield stream, delta

    def _prompt(self) -> ChatPrompt:
        body = {name: self._values[name] for name in self._names if name in self._values}
        return self._chat.prompt(body, self._service.max_prompt_tokens)


def _chat_format(service: Service) -> ChatFormat:
    if service.text.chat is None:
        raise ApiError(400, f"chat is not possible: {service.text.chat_refusal}", code="chat_unavailable")
    return service.text.chat


def _check_thinking(values: dict[str, Any]) -> None:
    effort = values.get("reasoning_effort", "high")
    if effort not in EFFORTS:
        raise ApiError.bad_value("reasoning_effort", repr(effort[:40]), ", ".join(EFFORTS))
    kind = values.get("thinking", {}).get("type", "enabled")
    if kind not in THINKING_TYPES:
        raise ApiError.bad_value("thinking", f"type {str(kind)[:40]!r}", f"type {', '.join(THINKING_TYPES)}")
