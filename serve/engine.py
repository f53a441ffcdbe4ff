"""The engine: one thread that plans, launches and commits steps, one step ahead of the tokens it reads."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from rorqual.serve.build import Built
from rorqual.serve.compiles import CompileCounter, counting
from rorqual.serve.limits import Limits
from rorqual.serve.pack import constrained, fill_row, masks, pack_step, unpack_output
from rorqual.serve.request import (
    Event,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    check_request,
    drop_events,
)
from rorqual.serve.schedule import Admission, Scheduler, StepPlan
from rorqual.serve.state import State
from rorqual.serve.step import StepOutput
from rorqual.serve.step_input import FILL_SEATS

log = logging.getLogger("rorqual.engine")
IDLE_WAIT_S = 0.5
LOG_EVENTS = 4096
T = TypeVar("T")


class StepEvent(NamedTuple):
    """An entry of the engine's log: what happened to which step, and when (monotonic seconds)."""

    kind: Literal["launch", "read", "commit"]
    step: int
    time_s: float


@dataclass
class InFlight:
    """A launched step whose tokens have not been read."""

    number: int
    plan: StepPlan
    output: StepOutput


class Look(NamedTuple):
    """A wish to read the device state between two steps."""

    read: Callable[[State], Any]
    found: Future[Any]


Sink = Callable[[list[Event]], None]


class EngineDead(RuntimeError):
    """The step loop has ended; `__cause__` says why."""


class Engine:
    """Runs requests. `submit` and `finish` may be called from any thread; everything else is the engine thread's."""

    def __init__(self, built: Built):
        self.limits: Limits = built.limits
        self.built = built
        self.log: deque[StepEvent] = deque(maxlen=LOG_EVENTS)
        self.num_steps = 0
        self._compiles = CompileCounter()
        self._programs = built.programs
        self._params: Any = built.params
        self._state: Any = built.programs.new_state()
        self._scheduler = Scheduler(
            built.limits,
            built.buckets,
            built.memory.num_global_pages,
            built.memory.num_window_pages,
            built.limits.max_step_tokens,
            built.sizes.num_penalty_rows,
        )
        self._in_flight: deque[InFlight] = deque()
        self._inbox: deque[Request | Look | tuple[int, FinishReason]] = deque()
        self._wake = threading.Condition()
        self._next_id = 0
        self._score_sinks: dict[int, Callable[[np.ndarray], None]] = {}
        self._stop, self._ready = False, False
        self._failure: BaseException | None = None
        self._heartbeat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rorqual-engine", daemon=True)

    # Any thread.

    def start(self) -> None:
        """Warm up and begin to serve; returns when ready. Raises what warm-up raised."""
        if self.built.options.warm_up:
            self._warm_up()
        self._ready = True
        self._heartbeat_s = time.monotonic()
        self._thread.start()

    def submit(self, prompt_ids: Sequence[int] | np.ndarray, params: SamplingParams, sink: Sink = drop_events) -> int:
        """Queue a request and return its id. Raises RequestError for a bad one, EngineDead when nobody would run it."""
        return self._queue(check_request(prompt_ids, params, self.limits), params, sink, None)

    def submit_score(
        self, prompt_ids: Sequence[int] | np.ndarray, on_logits: Callable[[np.ndarray], None], sink: Sink
    ) -> int:
        """Queue a scoring request: `on_logits` gets float32 `[n, vocab]` of its positions, chunk after chunk."""
        params = SamplingParams()
        return self._queue(check_request(prompt_ids, params, self.limits, score=True), params, sink, on_logits)

    def finish(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request early. Unknown and finished ids are ignored."""
        with self._wake:
            self._inbox.append((request_id, reason))
            self._wake.notify()

    def alive(self) -> bool:
        """True while the step loop runs and has been heard of within the stall timeout."""
        silent_s = time.monotonic() - self._heartbeat_s
        return self._thread.is_alive() and not self._stop and silent_s < self.built.options.stall_timeout_s

    def ready(self) -> bool:
        """True once warmed up, and as long as alive."""
        return self._ready and self.alive()

    @property
    def num_compiles(self) -> int:
        """Programs that the engine thread compiled since warm-up: 0 unless something is wrong."""
        return self._compiles.num_compiles

    @property
    def num_free_pages(self) -> tuple[int, int]:
        """Free (global, window) pages."""
        return self._scheduler.global_pool.num_free, self._scheduler.window_pool.num_free

    @property
    def num_live(self) -> int:
        """Requests that have not finished."""
        return self._scheduler.num_running + self._scheduler.num_waiting + len(self._inbox)

    def look(self, read: Callable[[State], T]) -> T:
        """What `read` finds in the device state between two steps, for people who want to see it.

        The next step overwrites the arrays it is given, so what it returns must be copies. Raises what `read` raises,
        and EngineDead when the engine has stopped.
        """
        found: Future[T] = Future()
        with self._wake:
            if self._stop or self._failure is not None:
                raise EngineDead("the engine has stopped") from self._failure
            self._inbox.append(Look(read, found))
            self._wake.notify()
        return found.result()

    def close(self) -> None:
        """End the thread; live requests end as aborted. May be called twice."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _queue(
        self, prompt: np.ndarray, params: SamplingParams, sink: Sink, on_logits: Callable[[np.ndarray], None] | None
    ) -> int:
        request = Request(-1, prompt, params, self.built.eos_ids, on_logits is not None, sink)
        self._scheduler.check_fits(request)
        with self._wake:
            if self._stop or self._failure is not None:
                raise EngineDead("the engine has stopped") from self._failure
            request.id = self._next_id
            self._next_id += 1
            if on_logits is not None:
                self._score_sinks[request.id] = on_logits
            self._inbox.append(request)
            self._wake.notify()
        return request.id

    # The engine thread.

    def _run(self) -> None:
        try:
            with counting(self._compiles):
                while not self._stop:
                    self._heartbeat_s = time.monotonic()
                    self._take_inbox()
                    if not self._turn():
                        self._wait()
        except BaseException as error:  # whatever it is, clients must hear of it
            log.exception("the step loop failed")
            self._failure = error
        self._end_everything()

    def _wait(self) -> None:
        with self._wake:
            if not self._inbox and not self._stop:
                self._wake.wait(IDLE_WAIT_S)

    def _take_inbox(self) -> None:
        while True:
            with self._wake:
                if not self._inbox:
                    return
                item = self._inbox.popleft()
            if isinstance(item, Request):
                self._scheduler.add(item)
            elif isinstance(item, Look):
                self._show(item)
            else:
                self._deliver(self._scheduler.finish(*item))

    def _show(self, look: Look) -> None:
        try:
            with counting(None):  # a reader may compile what it likes
                look.found.set_result(look.read(self._state))
        except Exception as error:
            look.found.set_exception(error)

    def _turn(self) -> bool:
        """Plan and launch a step, then commit the one before it. False: nothing to do."""
        plan = self._scheduler.plan()
        if plan is not None:
            self._launch(plan)
        while len(self._in_flight) > (plan is not None):
            self._commit(self._in_flight.popleft())
        return plan is not None or self._scheduler.num_in_flight > 0

    def _launch(self, plan: StepPlan) -> None:
        """Fill seats, send the input, start the step. Only a late input makes it wait for the tokens before."""
        shape = self._programs.shape(plan.bucket)
        packed = pack_step(plan, shape, self.limits.max_rows)
        self._fill_seats(plan.admitted)
        mask = self._late_mask(plan, shape.num_rows) if plan.late else None
        program = self._programs.step(plan.bucket, plan.score)
        self._state, output = program(self._params, self._state, self._programs.send(packed, mask))
        self._in_flight.append(InFlight(self.num_steps, plan, output))
        self.log.append(StepEvent("launch", self.num_steps, time.monotonic()))
        self.num_steps += 1
        if self.built.options.strict_compiles and self.num_compiles:
            raise RuntimeError(f"compilations after warm-up: {self.num_compiles}, allowed 0")

    def _fill_seats(self, admitted: Sequence[Admission]) -> None:
        shape = self.built.sizes.fill
        for first in range(0, len(admitted), FILL_SEATS):
            fill = np.full((FILL_SEATS, shape.length), -1, np.int32)
            fill[:, 0] = self.limits.max_rows
            for place, admission in enumerate(admitted[first : first + FILL_SEATS]):
                seed = admission.request.params.seed
                fill[place] = fill_row(admission, secrets.randbits(63) if seed is None else seed, shape)
            self._state = self._programs.fill(self._state, fill)

    def _late_mask(self, plan: StepPlan, num_rows: int) -> np.ndarray:
        """Wait for every token before, then ask the constraints what may follow."""
        while self._in_flight:
            self._commit(self._in_flight.popleft())
        generated = [self._scheduler.generated(row.request.id) if constrained(row) else None for row in plan.rows]
        try:
            return masks(plan, generated, num_rows, self.limits.vocab_size)
        except Exception as error:  # a constraint is foreign code
            return self._mask_without_faulty(plan, generated, num_rows, error)

    def _mask_without_faulty(
        self, plan: StepPlan, generated: list[Sequence[int] | None], num_rows: int, error: Exception
    ) -> np.ndarray:
        """End the requests whose constraint raises; the others go on."""
        log.warning("a constraint failed: %s", error)
        for place, row in enumerate(plan.rows):
            if generated[place] is not None:
                alone = [tokens if i == place else None for i, tokens in enumerate(generated)]
                try:
                    masks(plan, alone, num_rows, self.limits.vocab_size)
                except Exception as fault:
                    self._deliver(self._scheduler.finish(row.request.id, "error", f"constraint: {fault}"))
                    generated[place] = None
        return masks(plan, generated, num_rows, self.limits.vocab_size)

    def _commit(self, done: InFlight) -> None:
        """Read a step's tokens and let the scheduler and the clients know."""
        packed = np.asarray(done.output.packed)[0]
        self.log.append(StepEvent("read", done.number, time.monotonic()))
        if done.plan.score:
            self._deliver_logits(done)
        tokens, logprobs = unpack_output(packed, done.plan)
        self._deliver(self._scheduler.commit(done.plan, tokens, logprobs))
        self.log.append(StepEvent("commit", done.number, time.monotonic()))

    def _deliver_logits(self, done: InFlight) -> None:
        assert done.output.logits is not None
        logits, first = np.asarray(done.output.logits)[0], 0
        for row in done.plan.rows:
            sink = self._score_sinks.get(row.request.id)
            if sink is not None:
                sink(logits[first : first + row.count].copy())
            first += row.count

    def _deliver(self, events: Sequence[tuple[Request, Event]]) -> None:
        by_request: dict[Request, list[Event]] = {}
        for request, event in events:
            by_request.setdefault(request, []).append(event)
        for request, found in by_request.items():
            if isinstance(found[-1], Finished):
                self._score_sinks.pop(request.id, None)
            try:
                request.sink(found)
            except Exception:  # a client's fault must not end the others
                log.exception("the sink of request %d failed", request.id)

    def _end_everything(self) -> None:
        """Tell every live request that it is over."""
        reason: FinishReason = "error" if self._failure is not None else "abort"
        detail = f"the engine failed: {self._failure}" if self._failure is not None else None
        with self._wake:
            self._stop = True
            left = list(self._inbox)
            self._inbox.clear()
        for item in left:
            if isinstance(item, Request):
                self._deliver([(item, Finished(item.id, reason, len(item.prompt), 0, 0, detail))])
            elif isinstance(item, Look):
                item.found.set_exception(EngineDead("the engine has stopped"))
        for request_id in self._scheduler.live_ids():
            self._deliver(self._scheduler.finish(request_id, reason, detail))
        # What the devices hold goes with the thread, however long somebody keeps the engine itself.
        self._in_flight.clear()
        self._state = self._params = None
        self.built = replace(self.built, params={})

    def _warm_up(self) -> None:
        """Compile every program and run each once on rows that write nothing."""
        self._programs.compile_all(self.built.options.progress)
        self._fill_seats([])
        for bucket in self.built.buckets.token_sizes:
            shape = self._programs.shape(bucket)
            idle = StepPlan([], np.zeros(0, np.int32), [], [], bucket, False, False)
            packed = pack_step(idle, shape, self.limits.max_rows)
            self._state, output = self._programs.step(bucket)(self._params, self._state, self._programs.send(packed))
        jax.block_until_ready(output)
