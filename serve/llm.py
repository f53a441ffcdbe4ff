"""Offline use: load a checkpoint, generate, score. Works in scripts, threads, notebooks and under a running event loop:
the engine has a thread of its own and callers only wait for it."""

import queue
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rorqual.serve.build import build
from rorqual.serve.completion import Collector, Completion, CompletionDelta, refused
from rorqual.serve.engine import Engine
from rorqual.serve.options import EngineOptions
from rorqual.serve.request import Event, Finished, RequestError, SamplingParams
from rorqual.serve.text.plane import TextPlane
from rorqual.serve.text.text_stream import TextStream
from rorqual.serve.text.tokenizer import PromptTooLong

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model.

    >>> llm = LLM("path/to/checkpoint", context=4096)
    >>> [answer] = llm.generate(["The whale"], SamplingParams(max_tokens=16))
    >>> answer.text, answer.finish_reason, answer.usage
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """`options`: the fields of EngineOptions. Raises OptionError, ConfigError or CheckpointError, and returns when
        the model is loaded and every step program is compiled."""
        folder = Path(model_dir)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        self.text = TextPlane.from_dir(folder)
        self.engine = Engine(build(folder, EngineOptions(**options)))
        # The thread knows the engine, not this object: when nobody needs it any more, the engine ends.
        self._finalizer = weakref.finalize(self, self.engine.close)
        self.engine.start()

    @property
    def default_params(self) -> SamplingParams:
        """Sampling defaults of the checkpoint's generation_config.json."""
        defaults: dict[str, Any] = dict(self.text.sampling_defaults)
        return SamplingParams(**defaults)

    def generate(self, prompts: Sequence[Prompt], params: Params = None, *, progress: bool = False) -> list[Completion]:
        """Answers in the order of the prompts (texts, or lists of token ids); one `params` for all, or one a prompt.

        A prompt that is refused gets a completion with `error`; the others go on.
        """
        prompts, each = list(_checked(prompts)), self._params_of_each(prompts, params)
        answers: list[Completion | None] = [None] * len(prompts)
        collectors = [Collector(getattr(p, "logprobs", None) is not None) for p in each]
        run = Run(self.engine, self.text)
        bar = tqdm(total=len(prompts), desc="generating", unit="request", disable=not progress)
        with closing(run), bar:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                error = run.submit(index, prompt, one)
                if error is not None:
                    answers[index] = refused(error)
                    bar.update(1)
            for delta in run:
                collectors[delta.index].add(delta)
                if delta.finish is not None:
                    answers[delta.index] = collectors[delta.index].completion
                    bar.update(1)
        return [answer for answer in answers if answer is not None]

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> "Run":
        """The same, piece by piece as the tokens come; prompts interleave. Raises ValueError for a bad prompt, and then
        runs none. Closing or dropping the iterator aborts what is still running."""
        prompts, each = list(_checked(prompts)), self._params_of_each(prompts, params)
        run = Run(self.engine, self.text)
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                error = run.submit(index, prompt, one)
                if error is not None:
                    raise ValueError(f"prompts[{index}]: {error}")
        except BaseException:
            run.close()
            raise
        return run

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits of every position, through the same paged step: float32 `[len(token_ids), vocab]`.

        Raises RequestError for token ids or lengths outside the model's.
        """
        parts: list[np.ndarray] = []
        ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()

        def hear(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Finished):
                    ended.put(event)

        request_id = self.engine.submit_score(token_ids, parts.append, hear)
        try:
            finished = ended.get()
        except BaseException:
            self.engine.finish(request_id)
            raise
        if finished.reason == "error" or finished.reason == "abort":
            raise RuntimeError(f"score: {finished.detail or finished.reason}")
        return np.concatenate(parts)

    def close(self) -> None:
        """End the engine and free what it holds. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params_of_each(self, prompts: Sequence[Prompt], params: Params) -> list[SamplingParams]:
        if params is None:
            return [self.default_params] * len(prompts)
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)}, allowed one or as many as prompts = {len(prompts)}")
        return list(params)


def _checked(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts: {type(prompts).__name__}, allowed a list of texts or of lists of token ids")
    return prompts


class Run(Iterator[CompletionDelta]):
    """Requests of one call, and an iterator over what they bring, until every one has ended."""

    def __init__(self, engine: Engine, text: TextPlane) -> None:
        self._engine, self._text = engine, text
        self._queue: queue.SimpleQueue[tuple[int, list[Event]]] = queue.SimpleQueue()
        self._streams: dict[int, TextStream] = {}
        self._ids: dict[int, int] = {}

    def submit(self, index: int, prompt: Prompt, params: SamplingParams) -> str | None:
        """Queue one prompt; the error's text when it is refused."""
        try:
            ids = self._encode(prompt)
            heard = self._queue  # the engine must not keep this object alive: dropping it aborts its requests
            request_id = self._engine.submit(ids, params, lambda events: heard.put((index, events)))
        except (RequestError, PromptTooLong, ValueError) as error:
            return str(error)
        self._ids[index] = request_id
        self._streams[index] = TextStream(self._text.tokenizer, params)
        return None

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._text.tokenizer.encode_prompt(prompt, self._engine.limits.max_context - 1)
        return prompt

    def __next__(self) -> CompletionDelta:
        if not self._ids:
            raise StopIteration
        index, events = self._queue.get()
        delta = self._streams[index].feed(events)
        if delta.cut:
            self._engine.finish(self._ids[index], "stop")
        if delta.finish is not None:
            del self._ids[index]
        return CompletionDelta(index, delta.text, delta.tokens, delta.finish)

    def close(self) -> None:
        """Abort what is still running."""
        for request_id in self._ids.values():
            self._engine.finish(request_id)
        self._ids.clear()

    def __del__(self) -> None:
        self.close()
