"""Which rows make up the next step: admission, chunks, pages and seats, one step ahead of the tokens.

Why pages and seats may be handed on at once. Steps, and the small programs between them, run on the device in the
order in which they are planned. A row that is found to have ended may still be part of planned steps; these run before
any step planned later, so a page released now can only be rewritten after the row's last access to it. For the same
reason a window page that no later token of its row looks back to is released when the next step is planned, and may be
rewritten by that very step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rorqual.cache.pages import PagePool
from rorqual.serve.buckets import Buckets
from rorqual.serve.limits import Limits
from rorqual.serve.request import Event, Finished, FinishReason, Request, RequestError, Token
from rorqual.serve.running import ROW_WINDOW_PAGES, Running, num_positions

# Log-probability of a sampled token and the alternatives beside it, (token, logprob), best first.
TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]


class RowPlan(NamedTuple):
    """One row of a step: positions start..start+count-1 of one request."""

    request: Request
    seat: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    from_seat: bool  # True: token and position come from the seat (decode); False: from the host (prefill chunk)
    sample: bool  # True: the row's last position samples a token


class PageUpdate(NamedTuple):
    """From this step on, the seat's positions of page `page_index` lie in these two pages."""

    seat: int
    page_index: int
    global_page: int
    window_page: int


class Admission(NamedTuple):
    """A seat to be filled before the step."""

    seat: int
    request: Request
    penalty_row: int  # row of token counts to be cleared and used; -1: none


class StepPlan(NamedTuple):
    """Everything the host decides about one step. Decode rows come first, then prefill chunks by arrival."""

    rows: list[RowPlan]
    tokens: np.ndarray  # int32: tokens of the rows that are not from_seat, in the order of rows
    updates: list[PageUpdate]
    admitted: list[Admission]
    bucket: int  # size of the step in tokens
    late: bool  # a constrained row samples: commit what is in flight first, then build its mask, then launch
    score: bool  # a score row takes part: logits of all positions are wanted


class Scheduler:
    """Waiting and running requests of one rank. Not thread-safe: the engine thread alone calls it.

    Calls alternate as plan(n+1), launch, commit(n); plans are launched and committed in the order they were made.
    Admission keeps the order of arrival and promises a request all the global pages of its worst case (prompt and
    max_tokens) and ROW_WINDOW_PAGES window pages. So a running row can always go on, and nothing is ever taken from it.
    """

    def __init__(
        self,
        limits: Limits,
        buckets: Buckets,
        num_global_pages: int,
        num_window_pages: int,
        step_tokens: int,
        num_penalty_rows: int | None = None,
    ) -> None:
        """`step_tokens` bounds the tokens of a step; `num_penalty_rows` None: one for every seat.

        Raises ValueError naming a size that contradicts the others.
        """
        largest = buckets.token_sizes[-1]
        if not limits.max_rows <= step_tokens <= largest:
            raise ValueError(
                f"step_tokens: {step_tokens}, allowed {limits.max_rows} (rows)..{largest} (largest bucket)"
            )
        if num_window_pages < ROW_WINDOW_PAGES:
            raise ValueError(f"num_window_pages: {num_window_pages}, allowed at least {ROW_WINDOW_PAGES}")
        self.limits, self.buckets, self.step_tokens = limits, buckets, step_tokens
        self.global_pool = PagePool(num_global_pages)
        self.window_pool = PagePool(num_window_pages)
        self.num_penalty_rows = limits.max_rows if num_penalty_rows is None else num_penalty_rows
        self._seats = list(range(limits.max_rows - 1, -1, -1))  # free ones, the lowest is taken first
        self._penalty_rows = list(range(self.num_penalty_rows - 1, -1, -1))
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # both in order of arrival
        self._running: dict[int, Running] = {}
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a seat."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and not committed."""
        return len(self._in_flight)

    def live_ids(self) -> list[int]:
        """Ids of all requests that have not finished, running ones first."""
        return [*self._running, *self._waiting]

    def generated(self, request_id: int) -> Sequence[int] | None:
        """Committed tokens of a running request (what a constraint's mask depends on); None when it has no seat."""
        row = self._running.get(request_id)
        return None if row is None else row.generated

    def check_fits(self, request: Request) -> None:
        """Raises RequestError when the request could never run in these pools. May be called from any thread."""
        needed = num_positions(request, self.limits.max_context)
        room = self.global_pool.num_pages * self.limits.page_size
        if needed > room:
            field = "prompt" if len(request.prompt) > room else "max_tokens"
            raise RequestError(field, f"{needed} positions to compute", f"at most {room}, the size of the page pool")
        if request.params.uses_penalties and not self.num_penalty_rows:
            params = request.params
            off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
            field = next(name for name, value in off.items() if getattr(params, name) != value)
            allowed = f"{off[field]}: the engine keeps no token counts (0 penalty rows)"
            raise RequestError(field, str(getattr(params, field)), allowed)

    def add(self, request: Request) -> None:
        """Puts a request that passed `check_request` at the end of the waiting ones.

        Raises RequestError when it could never run in these pools, ValueError when its id is in use.
        """
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request id {request.id} is in use")
        self.check_fits(request)
        self._waiting[request.id] = request

    def finish(
        self, request_id: int, reason: FinishReason, detail: str | int | None = None
    ) -> list[tuple[Request, Event]]:
        """Ends a request from outside: abort, a stop string found in its text, an error.

        Its seat and pages are free at once; tokens still in flight are discarded. The one event has `num_generated`
        of the tokens committed so far. An unknown id is no error and gives no event: the request may just have ended.
        """
        if request_id in self._waiting:
            request = self._waiting.pop(request_id)
            return [(request, Finished(request.id, reason, len(request.prompt), 0, 0, detail))]
        if request_id in self._running:
            row = self._running[request_id]
            return [(row.request, self._end(row, reason, detail))]
        return []

    def plan(self) -> StepPlan | None:
        """Decides the next step. None: no row can go on before a commit, or there are no requests at all."""
        self._release_passed_window_pages()
        rows: list[RowPlan] = []
        updates: list[PageUpdate] = []
        for row in self._running.values():
            if row.decodes:
                rows.append(self._place(row, 1, updates))
        budget = self.step_tokens - len(rows)
        chunks: list[np.ndarray] = []
        admitted: list[Admission] = []
        for row in self._prefilling(admitted):
            count = self._chunk(row, budget)
            if count:
                chunks.append(row.feed[row.num_planned : row.num_planned + count])
                rows.append(self._place(row, count, updates))
                budget -= count
            if not budget:
                break
        if not rows:
            return None
        plan = StepPlan(
            rows=rows,
            tokens=np.concatenate(chunks) if chunks else np.zeros(0, np.int32),
            updates=updates,
            admitted=admitted,
            bucket=self.buckets.fit(self.step_tokens - budget),
            late=any(row.sample and row.request.params.constraint is not None for row in rows),
            score=any(row.request.score for row in rows),
        )
        self._in_flight.append(plan)
        return plan

    def commit(
        self, plan: StepPlan, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> list[tuple[Request, Event]]:
        """Takes in what a launched step sampled; returns the events in the order of its rows.

        `tokens` has one entry a row of the plan, `logprobs` too where it is given; entries of rows that do not sample
        are not looked at. A row whose request has ended meanwhile is discarded. EOS and stop tokens are found here:
        they count as generated, give no Token event, and end the request unless fewer than min_tokens came before.
        """
        if not self._in_flight or plan is not self._in_flight[0]:
            raise ValueError(f"commit out of order: {len(self._in_flight)} plans in flight, this is not the oldest")
        if len(tokens) != len(plan.rows) or (logprobs is not None and len(logprobs) != len(plan.rows)):
            raise ValueError(f"tokens: {len(tokens)} entries, allowed {len(plan.rows)}, one a row (logprobs likewise)")
        self._in_flight.popleft()
        events: list[tuple[Request, Event]] = []
        for index, planned in enumerate(plan.rows):
            row = self._running.get(planned.request.id)
            if row is None or row.request is not planned.request:
                continue
            if planned.sample:
                row.num_in_flight -= 1
                found = self._take(row, int(tokens[index]), None if logprobs is None else logprobs[index])
                events.extend((row.request, event) for event in found)
            elif row.request.score and planned.start + planned.count == len(row.feed):
                events.append((row.request, self._end(row, "length")))
        return events

    def check(self) -> None:
        """Every invariant of pages, seats and rows; AssertionError naming the one that is broken."""
        self.global_pool.check()
        self.window_pool.check()
        rows = self._running
        seats = sorted([row.seat for row in rows.values()] + self._seats)
        counted = [row.penalty_row for row in rows.values() if row.penalty_row >= 0]
        facts = {
            "a seat is free or taken by one row": seats == list(range(self.limits.max_rows)),
            "a penalty row is free or taken by one row": sorted(counted + self._penalty_rows)
            == list(range(self.num_penalty_rows)),
            "running rows alone own pages": set(rows) == self.global_pool.owners() == self.window_pool.owners(),
            "no request waits and runs": not rows.keys() & self._waiting.keys(),
        }
        facts |= {f"row {row.request.id}: {law}": holds for row in rows.values() for law, holds in self._laws(row)}
        for law, holds in facts.items():
            if not holds:
                raise AssertionError(law)

    def _laws(self, row: Running) -> list[tuple[str, bool]]:
        """What holds for a running row between any two calls."""
        size, name = self.limits.page_size, row.request.id
        window_pages = sorted(row.window.values())
        reached = range(max(0, row.num_planned - size + 1) // size, -(-row.num_planned // size))
        flying = sum(
            planned.request is row.request and planned.sample for plan in self._in_flight for planned in plan.rows
        )
        return [
            ("its global pages reach to where it stands", len(row.pages) == -(-row.num_planned // size)),
            ("its global pages are its own", sorted(row.pages) == sorted(self.global_pool.held(name))),
            ("its window pages are its own", window_pages == sorted(self.window_pool.held(name))),
            ("it holds the window before it", set(reached) <= row.window.keys()),
            ("sampled tokens are in flight or committed", flying == row.num_in_flight),
            ("it samples no more than it may", len(row.generated) + flying <= row.max_new_tokens),
        ]

    def _prefilling(self, admitted: list[Admission]) -> Iterator[Running]:
        """Rows that may take a chunk, by arrival. Whoever asks for more than are running has requests admitted."""
        yield from [row for row in self._running.values() if row.num_to_feed]
        while (row := self._admit()) is not None:
            admitted.append(Admission(row.seat, row.request, row.penalty_row))
            yield row

    def _admit(self) -> Running | None:
        """Gives the request that waits longest a seat and its promised pages; None when something is short."""
        if not self._waiting or not self._seats:
            return None
        request = next(iter(self._waiting.values()))
        counts, context, size = request.params.uses_penalties, self.limits.max_context, self.limits.page_size
        num_pages = -(-num_positions(request, context) // size)
        if num_pages > self.global_pool.num_unpromised or self.window_pool.num_unpromised < ROW_WINDOW_PAGES:
            return None
        if counts and not self._penalty_rows:
            return None
        del self._waiting[request.id]
        self.global_pool.reserve(request.id, num_pages)
        self.window_pool.reserve(request.id, ROW_WINDOW_PAGES)
        penalty_row = self._penalty_rows.pop() if counts else -1
        row = Running(request, self._seats.pop(), penalty_row, request.prompt, request.max_new_tokens(context))
        self._running[request.id] = row
        return row

    def _chunk(self, row: Running, budget: int) -> int:
        """Tokens of the row's next prefill chunk: what budget and window pages allow. Never 0 while budget is left."""
        reach = len(row.pages) + self.window_pool.available(row.request.id)
        return min(budget, row.num_to_feed, reach * self.limits.page_size - row.num_planned)

    def _place(self, row: Running, count: int, updates: list[PageUpdate]) -> RowPlan:
        """Plans the row's next `count` positions, with the pages that they reach."""
        start, end, name = row.num_planned, row.num_planned + count, row.request.id
        for index in range(len(row.pages), -(-end // self.limits.page_size)):
            (global_page,) = self.global_pool.allocate(name)
            (window_page,) = self.window_pool.allocate(name)
            row.pages.append(global_page)
            row.window[index] = window_page
            updates.append(PageUpdate(row.seat, index, global_page, window_page))
        row.num_planned = end
        sample = end >= len(row.feed) and not row.request.score
        row.num_in_flight += sample
        return RowPlan(row.request, row.seat, start, count, start >= len(row.feed), sample)

    def _release_passed_window_pages(self) -> None:
        for row in self._running.values():
            if passed := row.passed_window_pages(self.limits.page_size):
                self.window_pool.release(row.request.id, [row.window.pop(index) for index in passed])

    def _take(self, row: Running, token: int, logprobs: TokenLogprobs | None) -> list[Event]:
        """Counts one sampled token, and finds out whether it is the last."""
        if not 0 <= token < self.limits.vocab_size:
            return [self._end(row, "error", f"sampled token: {token}, allowed 0..{self.limits.vocab_size - 1}")]
        params = row.request.params
        may_stop = len(row.generated) >= params.min_tokens
        row.generated.append(token)
        if may_stop and token in row.request.stop_ids:
            return [self._end(row, "stop", token if token in params.stop_token_ids else None)]
        events: list[Event] = [Token(row.request.id, token)]
        if logprobs is not None and params.logprobs is not None:
            events = [Token(row.request.id, token, logprobs[0], tuple(logprobs[1][: params.logprobs]))]
        if len(row.generated) == row.max_new_tokens:
            events.append(self._end(row, "length"))
        return events

    def _end(self, row: Running, reason: FinishReason, detail: str | int | None = None) -> Finished:
        """Takes seat and pages from the row, at once (see the module's first lines)."""
        request = row.request
        del self._running[request.id]
        self.global_pool.close(request.id)
        self.window_pool.close(request.id)
        self._seats.append(row.seat)
        if row.penalty_row >= 0:
            self._penalty_rows.append(row.penalty_row)
        return Finished(request.id, reason, len(request.prompt), len(row.generated), row.num_cached, detail)
