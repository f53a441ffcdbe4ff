"""The scheduler against a device of ghosts: random traffic in tiny pools, every read checked, every event foretold.

The ghost device keeps in each slot who wrote it: (request, position). A step writes the slots of all its rows, then
reads what their tokens look at. So a page handed on too early, a stale page table or a wrong position is a read of a
foreign ghost.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.serve.buckets import bucket_table
from rorqual.serve.limits import Limits
from rorqual.serve.request import Finished, Request, RequestError, SamplingParams, Token
from rorqual.serve.schedule import Scheduler

VOCAB, EOS, STOP = 50, 1, 2


@dataclass(frozen=True)
class Traffic:
    """One random history; everything else is drawn from `seed`."""

    seed: int
    page_size: int
    max_rows: int
    step_tokens: int  # beyond one for each row
    window_pages: int  # beyond the two that one row needs
    global_pages: int
    penalty_rows: int
    max_context: int
    num_requests: int
    ahead: int  # launched steps that may be uncommitted when the next is launched
    storm: float  # chance, at each of three moments of a step, that somebody gives up
    end: float  # chance that a sampled token is EOS or a stop token


def traffic(max_requests: int) -> st.SearchStrategy[Traffic]:
    return st.builds(
        Traffic,
        seed=st.integers(0, 2**32 - 1),
        page_size=st.sampled_from([2, 4, 8]),
        max_rows=st.integers(1, 5),
        step_tokens=st.integers(0, 40),
        window_pages=st.integers(0, 12),
        global_pages=st.integers(2, 40),
        penalty_rows=st.integers(0, 2),
        max_context=st.integers(2, 90),
        num_requests=st.integers(max_requests // 4, max_requests),
        ahead=st.sampled_from([0, 1, 1, 1, 2]),
        storm=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
        end=st.sampled_from([0.0, 0.05, 0.3]),
    )


class AnyToken:
    """A constraint that allows everything; what matters here is that its row is late."""

    def mask(self, generated):
        return np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32)


def draw_request(draw: random.Random, number: int, context: int) -> Request:
    score = draw.random() < 0.1
    longest = context if score else context - 1
    length = min(longest, draw.choice([1, draw.randint(1, 9), draw.randint(1, longest)]))
    room = context - length
    max_tokens = None if score or draw.random() < 0.2 else draw.randint(1, min(room, draw.choice([1, 6, 40])))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw.randint(0, max_tokens or room) if draw.random() < 0.2 else 0,
        ignore_eos=draw.random() < 0.3,
        stop_token_ids=(STOP,) if draw.random() < 0.5 else (),
        presence_penalty=1.0 if draw.random() < 0.2 else 0.0,
        constraint=AnyToken() if draw.random() < 0.15 else None,
    )
    return Request(number, np.array([draw.randrange(VOCAB) for _ in range(length)], np.int32), params, (EOS,), score)


def sampled(history: Traffic, request: Request, index: int) -> int:
    """What the model samples as generated token `index`, whatever the company."""
    draw = random.Random(f"{history.seed} {request.id} {index}")
    token = draw.choice([EOS, STOP]) if draw.random() < history.end else draw.randrange(3, VOCAB)
    banned = index < request.params.min_tokens and token in request.stop_ids
    return 3 if banned else token


def foretold(history: Traffic, request: Request) -> list[Token | Finished]:
    """The events of a request that is left alone, from its tokens one after the other."""
    events: list[Token | Finished] = []
    params, length = request.params, len(request.prompt)
    most = 0 if request.score else min(params.max_tokens or history.max_context, history.max_context - length)
    for index in range(most):
        token = sampled(history, request, index)
        if index >= params.min_tokens and token in params.stop_token_ids:
            return [*events, Finished(request.id, "stop", length, index + 1, 0, token)]
        if index >= params.min_tokens and token == EOS and not params.ignore_eos:
            return [*events, Finished(request.id, "stop", length, index + 1, 0, None)]
        events.append(Token(request.id, token))
    return [*events, Finished(request.id, "length", length, most, 0, None)]


class GhostDevice:
    """Two slot spaces (0 global, 1 window) and the seats; ghosts are request * 2**32 + position."""

    def __init__(self, history: Traffic, num_window_pages: int) -> None:
        self.history, self.size = history, history.page_size
        self.spaces = [np.full(count * self.size, -1) for count in (history.global_pages, num_window_pages)]
        # Never cleared: what a seat's last owner left in the page tables must not matter.
        self.tables = np.full((2, history.max_rows, history.max_context + 1), -1)
        self.position = [-1] * history.max_rows

    def launch(self, plan) -> list[int]:
        """Runs one step; returns a token for each row, nonsense for those that do not sample."""
        for admission in plan.admitted:
            self.position[admission.seat] = 0
        for update in plan.updates:
            self.tables[:, update.seat, update.page_index] = update.global_page, update.window_page
        for row in plan.rows:
            assert row.start == self.position[row.seat], "the seat stands elsewhere"
            self.position[row.seat] = row.start + row.count
            for space in (0, 1):
                slots, ghosts = self.slots(row, space, row.start)
                self.spaces[space][slots] = ghosts
        for row in plan.rows:
            for space, first in ((0, 0), (1, max(0, row.start - self.size + 1))):
                slots, ghosts = self.slots(row, space, first)
                assert (self.spaces[space][slots] == ghosts).all(), f"row {row.request.id} reads a foreign page"
        ends = [row.start + row.count - len(row.request.prompt) for row in plan.rows]
        pairs = zip(plan.rows, ends, strict=True)
        return [sampled(self.history, row.request, end) if row.sample else -7 for row, end in pairs]

    def slots(self, row, space: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots of the row's positions from `first` to its end, and the ghosts that belong there."""
        positions = np.arange(first, row.start + row.count)
        pages = self.tables[space, row.seat, positions // self.size]
        assert (pages >= 0).all()
        return pages * self.size + positions % self.size, row.request.id * 2**32 + positions


class Drive:
    """Plays one history through a scheduler and a ghost device."""

    def __init__(self, history: Traffic) -> None:
        self.history, self.draw = history, random.Random(history.seed)
        limits = Limits(VOCAB, history.max_context, history.max_rows, history.max_rows + 40, history.page_size)
        self.step_tokens, self.window_pages = history.max_rows + history.step_tokens, 2 + history.window_pages
        buckets = bucket_table(history.max_rows + 40, history.max_rows)
        sizes = (history.global_pages, self.window_pages, self.step_tokens, history.penalty_rows)
        self.scheduler = Scheduler(limits, buckets, *sizes)
        self.device = GhostDevice(history, self.window_pages)
        numbers = range(history.num_requests)
        self.coming = [draw_request(self.draw, number, history.max_context) for number in numbers]
        self.events: dict[int, list[Token | Finished]] = {}  # of accepted requests
        self.given_up: dict[int, str] = {}
        self.requests: dict[int, Request] = {}
        self.launched: list[tuple] = []  # plans with their tokens, not committed
        self.planned: dict[int, int] = {}  # positions planned, of admitted live requests
        self.num_plans = self.work = 0

    def run(self) -> None:
        while self.coming or self.scheduler.live_ids() or self.launched:
            self.arrivals()
            self.storm()
            plan = self.scheduler.plan()
            self.scheduler.check()
            if plan is None:
                assert self.launched or not self.scheduler.live_ids(), "deadlock"
            else:
                self.judge(plan)
                self.storm()
                if plan.late:
                    self.commit_down_to(0)
                    self.judge_late(plan)
                self.launched.append((plan, self.device.launch(plan)))
                self.storm()
            self.commit_down_to(self.history.ahead if plan is not None else 0)
        assert self.num_plans <= self.work, "more steps than tokens"
        self.judge_end()

    def arrivals(self) -> None:
        while self.coming and self.draw.random() < 0.4:
            request = self.coming.pop(0)
            length, most = len(request.prompt), self.max_new(request)
            if (
                self.pages(request) > self.history.global_pages
                or self.wants_counts(request) > self.history.penalty_rows
            ):
                with pytest.raises(RequestError, match="allowed"):
                    self.scheduler.add(request)
                continue
            self.scheduler.add(request)
            self.requests[request.id], self.events[request.id] = request, []
            self.work += length + most

    def storm(self) -> None:
        for number in self.scheduler.live_ids():
            if self.draw.random() < self.history.storm:
                reason = self.draw.choice(["abort", "stop"])
                self.given_up[number] = reason
                self.take(self.scheduler.finish(number, reason, "END"))
                assert self.scheduler.finish(number, reason) == []
                self.scheduler.check()

    def commit_down_to(self, ahead: int) -> None:
        while len(self.launched) > ahead:
            plan, tokens = self.launched.pop(0)
            self.take(self.scheduler.commit(plan, tokens))
            self.scheduler.check()

    def take(self, events) -> None:
        for request, event in events:
            assert request is self.requests[request.id] and event.id == request.id
            self.events[request.id].append(event)
            if isinstance(event, Finished):
                self.planned.pop(request.id, None)

    def judge(self, plan) -> None:
        """What every plan must be, told from the plans before it."""
        self.num_plans += 1
        before, sizes = dict(self.planned), [row.count for row in plan.rows]
        assert 1 <= sum(sizes) <= self.step_tokens and min(sizes) >= 1
        assert sum(sizes) <= plan.bucket and len(sizes) <= self.scheduler.buckets.rows(plan.bucket)
        assert len({row.seat for row in plan.rows}) == len(sizes)
        # decode rows always ride: all of them, one token each, first in the step
        riding = [row.request.id for row in plan.rows if row.from_seat]
        live = self.requests
        assert riding == [n for n, end in before.items() if 0 <= end - len(live[n].prompt) < self.max_new(live[n]) - 1]
        self.judge_rows(plan.rows)
        fed = [row for row in plan.rows if not row.from_seat]
        assert plan.rows == [row for row in plan.rows if row.from_seat] + fed
        pieces = [row.request.prompt[row.start : row.start + row.count] for row in fed]
        assert plan.tokens.dtype == np.int32 and plan.tokens.tolist() == [int(t) for piece in pieces for t in piece]
        assert plan.score == any(row.request.score for row in plan.rows)
        assert plan.late == any(row.sample and row.request.params.constraint is not None for row in plan.rows)
        self.judge_order(plan, before, [row.request.id for row in fed], self.step_tokens - sum(sizes))

    def judge_rows(self, rows) -> None:
        for row in rows:
            number, length, end = row.request.id, len(row.request.prompt), row.start + row.count
            assert row.start == self.planned.get(number, 0) and row.from_seat == (row.start >= length)
            assert row.count == 1 if row.from_seat else end <= length
            assert row.sample == (end >= length and not row.request.score)
            self.planned[number] = end
            # just the window pages that this step touches: one released late would cost another row its place
            size, held = self.history.page_size, self.scheduler.window_pool.held(number)
            assert len(held) == -(-end // size) - max(0, row.start - size + 1) // size

    def judge_order(self, plan, before, fed, left) -> None:
        """Arrival decides who is fed and who is admitted, and nothing is left over that somebody could use."""
        assert fed == sorted(fed)
        admitted = [admission.request.id for admission in plan.admitted]
        waiting = [n for n in self.scheduler.live_ids() if n not in self.planned]
        assert admitted == [n for n in fed if n not in before]
        assert admitted + waiting == sorted(admitted + waiting) and (
            not before or not waiting or max(before) < min(waiting)
        )
        for admission in plan.admitted:
            assert (admission.penalty_row >= 0) == bool(self.wants_counts(admission.request))
        if not left:
            return
        for number, end in self.planned.items():  # a chunk is cut by the budget, or where window pages end
            assert end >= len(self.requests[number].prompt) or end % self.history.page_size == 0
        if waiting:
            running, first = [self.requests[n] for n in self.planned], self.requests[waiting[0]]
            counted = sum(map(self.wants_counts, [*running, first]))
            assert (
                len(running) == self.history.max_rows
                or sum(map(self.pages, [*running, first])) > self.history.global_pages
                or counted > self.history.penalty_rows
                or self.scheduler.window_pool.num_unpromised < 2
            )

    def judge_late(self, plan) -> None:
        """When a late plan is launched, the mask's input is complete."""
        for row in plan.rows:
            if row.sample and (generated := self.scheduler.generated(row.request.id)) is not None:
                assert len(generated) == row.start + row.count - len(row.request.prompt)

    def judge_end(self) -> None:
        scheduler = self.scheduler
        scheduler.check()  # with no row running this says: every seat and penalty row is free
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.global_pool.num_unpromised == self.history.global_pages
        assert scheduler.window_pool.num_unpromised == self.window_pages
        for number, events in self.events.items():
            expected = foretold(self.history, self.requests[number])
            if number in self.given_up:
                shown = len(events) - 1
                length = len(self.requests[number].prompt)
                expected = [*expected[:shown], Finished(number, self.given_up[number], length, shown, 0, "END")]
            assert events == expected

    def max_new(self, request: Request) -> int:
        return request.max_new_tokens(self.history.max_context)

    def pages(self, request: Request) -> int:
        return -(-(len(request.prompt) + max(0, self.max_new(request) - 1)) // self.history.page_size)

    def wants_counts(self, request: Request) -> int:
        return int(request.params.presence_penalty != 0)


@settings(max_examples=800, deadline=None)
@given(traffic(max_requests=12))
def test_random_traffic(history):
    Drive(history).run()


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(traffic(max_requests=40))
def test_much_random_traffic(history):
    Drive(history).run()
