"""Requests on their way through the engine: submitting, hearing events on the event loop, giving up."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from rorqual.serve.limits import Limits
from rorqual.serve.request import Event, Finished, FinishReason, SamplingParams

WATCH_INTERVAL_S = 1.0

PromptIds = Sequence[int] | np.ndarray

log = logging.getLogger("rorqual.api")


class EngineClient(Protocol):
    """What the text and HTTP sides see of the engine. All methods may be called from any thread."""

    limits: Limits

    def submit(self, prompt_ids: PromptIds, params: SamplingParams, sink: Callable[[list[Event]], None]) -> int:
        """Queue a request and return its id; raises RequestError before the engine sees a bad one."""
        ...

    def finish(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request early. Unknown and finished ids are ignored."""
        ...

    def alive(self) -> bool:
        """True while the step loop's heartbeat is fresh."""
        ...

    def ready(self) -> bool:
        """True once requests can be served."""
        ...


class Batch:
    """Requests submitted together, numbered from 0; their events in order of arrival, on the event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._arrived: list[tuple[int, list[Event]]] = []
        self._wake = asyncio.Event()
        self._ids: list[int | None] = []
        self._over: set[int] = set()

    def submit(self, prompt: PromptIds, params: SamplingParams, post: Callable[[int, list[Event]], None]) -> None:
        """Submit one more request; `post(number, events)` is called on the engine thread."""
        number = len(self._ids)
        self._ids.append(None)
        self._ids[number] = self._engine.submit(prompt, params, lambda events: post(number, events))

    def put(self, number: int, events: list[Event]) -> None:
        """Add events of one request; nothing after its Finished event counts."""
        if events and number not in self._over:
            self._arrived.append((number, events))
            if isinstance(events[-1], Finished):
                self._over.add(number)
            self._wake.set()

    async def arrivals(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """Number and events of a request, until all requests are finished."""
        num_open = len(self._ids)
        while num_open:
            await self._wake.wait()
            self._wake.clear()
            arrived, self._arrived = self._arrived, []
            for number, events in arrived:
                num_open -= isinstance(events[-1], Finished)
                yield number, events

    def finish(self, number: int, reason: FinishReason) -> None:
        """Ask the engine to end a request, if it still runs."""
        request_id = self._ids[number]
        if request_id is not None and number not in self._over:
            self._engine.finish(request_id, reason)

    def finish_all(self, reason: FinishReason) -> None:
        """Ask the engine to end every request that still runs."""
        for number in range(len(self._ids)):
            self.finish(number, reason)

    def fail(self, detail: str) -> None:
        """End every request that still runs with an error."""
        for number in range(len(self._ids)):
            self.put(number, [Finished(self._ids[number] or 0, "error", 0, 0, 0, detail)])


class Runs:
    """All open batches of one server. Lives on one event loop, from the first request on.

    Events of a whole step reach the loop by one wake-up. Requests to an engine that has died end with an error.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._inbox: deque[tuple[Batch, int, list[Event]]] = deque()
        self._woken = False
        self._open: set[Batch] = set()
        self._watching = False

    @property
    def num_open(self) -> int:
        """HTTP requests whose answers are under way."""
        return len(self._open)

    @contextmanager
    def submitted(self, requests: Sequence[tuple[PromptIds, SamplingParams]]) -> Iterator[Batch]:
        """Submit requests together; whatever still runs when the block is left is aborted.

        Raises:
            RequestError: one of them is refused; none stays in the engine.
        """
        loop = asyncio.get_running_loop()
        batch = Batch(self._engine)
        self._open.add(batch)
        try:
            for prompt, params in requests:
                batch.submit(prompt, params, partial(self._post, loop, batch))
            self._watch(loop)
            yield batch
        finally:
            batch.finish_all("abort")
            self._open.discard(batch)

    def fail_all(self, detail: str) -> None:
        """End everything that still runs: the engine is told to abort it, the clients get an error."""
        for batch in list(self._open):
            batch.finish_all("abort")
            batch.fail(detail)

    def _post(self, loop: asyncio.AbstractEventLoop, batch: Batch, number: int, events: list[Event]) -> None:
        """On the engine thread: leave events for the loop and wake it, unless it has been woken already."""
        self._inbox.append((batch, number, events))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                log.info("events arrived after the event loop was closed")

    def _deliver(self) -> None:
        # Cleared first: events posted from now on schedule another delivery, so none is left lying.
        self._woken = False
        while self._inbox:
            batch, number, events = self._inbox.popleft()
            batch.put(number, events)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._watching and self._open:
            self._watching = True
            loop.call_later(WATCH_INTERVAL_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = False
        if not self._engine.alive():
            self.fail_all("the engine has stopped")
        self._watch(loop)
