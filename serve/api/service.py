"""What the endpoints share: engine, text, facts about the server, open runs and the tokenizing threads."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rorqual.serve.api.errors import ApiError
from rorqual.serve.api.runs import EngineClient, Runs
from rorqual.serve.request import RequestError
from rorqual.serve.text.chat import ChatError
from rorqual.serve.text.plane import TextPlane
from rorqual.serve.text.text_stream import Finish
from rorqual.serve.text.tokenizer import NotUnicode, PromptTooLong

T = TypeVar("T")


@dataclass(frozen=True)
class ServerInfo:
    """Facts and limits of one server. The first model name is the one answers carry by default."""

    model_names: tuple[str, ...]
    max_body_bytes: int = 32 << 20
    max_prompts: int = 128
    num_tokenize_threads: int = 2
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    """Shared state of the endpoints of one server."""

    def __init__(self, engine: EngineClient, text: TextPlane, info: ServerInfo) -> None:
        self.engine = engine
        self.text = text
        self.info = info
        self.runs = Runs(engine)
        self.draining = False
        # Few threads: tokenizing gives the interpreter lock away, but not its share of the processor.
        self._pool = ThreadPoolExecutor(info.num_tokenize_threads, "tokenize")

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: one position is left to generate."""
        return self.engine.limits.max_context - 1

    def check_open(self) -> None:
        """Raises ApiError(503) when no new request is taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if not self.engine.alive() or not self.engine.ready():
            raise ApiError(503, "the engine is not ready", code="not_ready")

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run work on a tokenizing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (int32) of plain prompts; raises PromptTooLong or NotUnicode."""
        encode, allowed = self.text.tokenizer.encode_prompt, self.max_prompt_tokens
        return await self.off_loop(lambda: [np.array(encode(text, allowed), np.int32) for text in texts])


def as_api_error(error: Exception, renamed: dict[str, str] | None = None) -> ApiError | None:
    """The 400 that a refused request is answered with; None for an error that is not the client's.

    Args:
        error: what was raised while the request was prepared or submitted.
        renamed: names of sampling parameters that the endpoint's body spells differently.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        name = (renamed or {}).get(error.field, error.field)
        return ApiError(400, name + str(error).removeprefix(error.field), name)
    if isinstance(error, PromptTooLong):
        name = (renamed or {}).get("prompt", "prompt")
        return ApiError(400, f"{name}: {error}", name, "context_length_exceeded")
    if isinstance(error, ChatError):
        return ApiError(400, str(error), error.field)
    if isinstance(error, NotUnicode):
        return ApiError(400, f"prompt: {error}, allowed Unicode text", "prompt")
    return None


def check_finish(finish: Finish) -> None:
    """Raises ApiError when a generation ended neither by itself nor by its limits."""
    if finish.reason == "error":
        raise ApiError(500, f"the generation failed: {finish.error}", code="engine_error")
    if finish.reason == "abort":
        raise ApiError(503, "the generation was aborted by the server", code="aborted")
