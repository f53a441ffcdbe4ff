"""Single rules of the scheduler, one small example each; their interplay is in test_schedule.py."""

import numpy as np
import pytest

from rorqual.serve.buckets import bucket_table
from rorqual.serve.limits import Limits
from rorqual.serve.request import Finished, Request, RequestError, SamplingParams, Token
from rorqual.serve.schedule import PageUpdate, Scheduler

EOS, STOP = 1, 2
LIMITS = Limits(vocab_size=100, max_context=64, max_rows=4, max_step_tokens=32, page_size=4)


def scheduler(**changes) -> Scheduler:
    sizes = {"num_global_pages": 40, "num_window_pages": 20, "step_tokens": 32} | changes
    return Scheduler(LIMITS, bucket_table(32, 4), **sizes)


def request(number: int, length: int, *, score: bool = False, **params) -> Request:
    return Request(number, np.arange(10, 10 + length, dtype=np.int32), SamplingParams(**params), (EOS,), score)


def shape(plan) -> list[tuple[int, int, int]]:
    return [(row.request.id, row.start, row.count) for row in plan.rows]


def test_chunks_share_a_step_by_arrival_and_decode_rows_go_first():
    plans = scheduler(step_tokens=8)
    for number in range(2):
        plans.add(request(number, 6, max_tokens=3))
    steps = [plans.plan() for _ in range(3)]
    assert [shape(step) for step in steps] == [[(0, 0, 6), (1, 0, 2)], [(0, 6, 1), (1, 2, 4)], [(0, 7, 1), (1, 6, 1)]]
    assert [[row.sample for row in step.rows] for step in steps] == [[True, False], [True, True], [True, True]]
    assert [step.tokens.tolist() for step in steps] == [[10, 11, 12, 13, 14, 15, 10, 11], [12, 13, 14, 15], []]
    assert [step.bucket for step in steps] == [16, 16, 16]


def test_a_row_whose_last_token_is_planned_is_not_planned_again():
    plans = scheduler()
    plans.add(request(0, 3, max_tokens=2))
    first, second = plans.plan(), plans.plan()
    assert plans.plan() is None and plans.num_in_flight == 2
    plans.commit(first, [7])
    (token, finished) = [event for _, event in plans.commit(second, [8])]
    assert token == Token(0, 8) and finished == Finished(0, "length", 3, 2, 0)
    assert plans.plan() is None and plans.live_ids() == []


def test_eos_is_learned_one_step_late_and_the_surplus_step_leaves_no_trace():
    plans = scheduler()
    plans.add(request(0, 3))
    first, surplus = plans.plan(), plans.plan()
    assert [event for _, event in plans.commit(first, [EOS])] == [Finished(0, "stop", 3, 1, 0)]
    assert plans.global_pool.num_unpromised == 40  # free before the surplus step is committed
    assert plans.commit(surplus, [9]) == []
    plans.check()


def test_an_id_used_again_does_not_receive_tokens_of_the_old_request():
    plans = scheduler()
    plans.add(request(0, 3))
    first = plans.plan()
    plans.finish(0, "abort")
    plans.add(request(0, 5, max_tokens=1))
    second = plans.plan()
    assert plans.commit(first, [9]) == []
    assert plans.commit(second, [8])[0][1] == Token(0, 8)


@pytest.mark.parametrize(
    ("params", "sampled", "last", "shown"),
    [
        ({}, [5, EOS], Finished(0, "stop", 3, 2, 0), 1),
        ({"ignore_eos": True, "max_tokens": 2}, [EOS, EOS], Finished(0, "length", 3, 2, 0), 2),
        ({"stop_token_ids": [STOP]}, [STOP], Finished(0, "stop", 3, 1, 0, STOP), 0),
        ({"stop_token_ids": [STOP], "ignore_eos": True}, [EOS, STOP], Finished(0, "stop", 3, 2, 0, STOP), 1),
        ({"min_tokens": 2}, [EOS, EOS, EOS], Finished(0, "stop", 3, 3, 0), 2),
        ({"max_tokens": 1}, [EOS], Finished(0, "stop", 3, 1, 0), 0),
        ({}, [5, -1], Finished(0, "error", 3, 1, 0, "sampled token: -1, allowed 0..99"), 1),
        ({}, [100], Finished(0, "error", 3, 0, 0, "sampled token: 100, allowed 0..99"), 0),
    ],
)
def test_how_a_request_ends(params, sampled, last, shown):
    plans, events = scheduler(), []
    plans.add(request(0, 3, **params))
    for token in sampled:
        events += [event for _, event in plans.commit(plans.plan(), [token])]
    assert events == [Token(0, token) for token in sampled[:shown]] + [last]


def test_a_token_brings_the_alternatives_that_were_asked_for():
    plans = scheduler()
    for number, wanted in enumerate([None, 0, 2]):
        plans.add(request(number, 3, max_tokens=9, logprobs=wanted))
    found = (-0.5, ((7, -0.5), (8, -1.0), (9, -2.0)))
    events = [event for _, event in plans.commit(plans.plan(), [7, 7, 7], [found] * 3)]
    assert events == [Token(0, 7), Token(1, 7, -0.5, ()), Token(2, 7, -0.5, ((7, -0.5), (8, -1.0)))]


def test_a_score_request_ends_with_the_commit_of_its_last_chunk():
    plans = scheduler()
    plans.add(request(0, 64, score=True))
    first, second = plans.plan(), plans.plan()
    assert first.score and not any(row.sample for row in first.rows + second.rows) and plans.plan() is None
    assert plans.commit(first, [0]) == []
    assert plans.commit(second, [0])[0][1] == Finished(0, "length", 64, 0, 0)


def test_the_last_token_allowed_by_the_context_needs_no_position():
    plans = scheduler(num_global_pages=16)
    plans.add(request(0, 60))
    assert plans.plan() is not None and plans.global_pool.num_unpromised == 0
    plans.finish(0, "abort")
    plans.add(request(1, 61))  # 61 + 3 - 1 positions
    plans.plan()
    assert plans.global_pool.num_unpromised == 0


def test_pages_come_as_positions_reach_them_and_windows_go_as_they_are_passed():
    plans = scheduler(step_tokens=6)
    plans.add(request(0, 11))
    first, second = plans.plan(), plans.plan()
    assert first.updates == [PageUpdate(0, 0, 0, 0), PageUpdate(0, 1, 1, 1)]
    # position 6 looks back to position 3, the last of page 0
    assert second.updates == [PageUpdate(0, 2, 2, 2)] and plans.window_pool.held(0) == {0, 1, 2}
    assert plans.plan().updates == []  # position 11 looks back to 8: page 2 alone is needed
    assert plans.window_pool.held(0) == {2} and plans.global_pool.held(0) == {0, 1, 2}


def test_a_chunk_shrinks_to_the_window_pages_there_are():
    plans = scheduler(num_window_pages=5)
    for number in range(2):
        plans.add(request(number, 30, max_tokens=1))
    # two pages are promised to the other row from its admission on, which comes after the first chunk was cut
    assert shape(plans.plan()) == [(0, 0, 20)]
    assert shape(plans.plan()) == [(0, 20, 10)]


def test_admission_waits_for_the_worst_case_and_keeps_the_order_of_arrival():
    plans = scheduler(num_global_pages=10)
    plans.add(request(0, 8, max_tokens=21))  # 7 pages
    plans.add(request(1, 8, max_tokens=9))  # 4 pages: must wait
    plans.add(request(2, 4, max_tokens=1))  # 1 page: would fit, and waits behind
    assert [admission.request.id for admission in plans.plan().admitted] == [0]
    assert plans.num_waiting == 2 and shape(plans.plan()) == [(0, 8, 1)]
    plans.finish(0, "abort")
    assert [admission.request.id for admission in plans.plan().admitted] == [1, 2]


def test_penalty_rows_are_waited_for():
    plans = scheduler(num_penalty_rows=1)
    plans.add(request(0, 3, presence_penalty=0.5))
    plans.add(request(1, 3))
    plans.add(request(2, 3, repetition_penalty=1.1))
    assert [(admission.request.id, admission.penalty_row) for admission in plans.plan().admitted] == [(0, 0), (1, -1)]
    plans.finish(0, "abort")
    assert [(admission.request.id, admission.penalty_row) for admission in plans.plan().admitted] == [(2, 0)]


def test_a_request_is_ended_wherever_it_is():
    plans = scheduler()
    for number in range(6):
        plans.add(request(number, 3, max_tokens=9))
    step = plans.plan()
    plans.commit(step, [5, 5, 5, 5])
    assert [event for _, event in plans.finish(5, "abort")] == [Finished(5, "abort", 3, 0, 0)]
    assert [event for _, event in plans.finish(1, "stop", "END")] == [Finished(1, "stop", 3, 1, 0, "END")]
    assert plans.finish(5, "abort") == plans.finish(99, "abort") == []
    assert plans.live_ids() == [0, 2, 3, 4]
    following = plans.plan()
    assert [admission.seat for admission in following.admitted] == [1]
    assert [row.request.id for row in following.rows] == [0, 2, 3, 4]


def test_a_late_plan_sees_the_tokens_before_it():
    class Anything:
        def mask(self, generated):
            return np.full(4, 2**32 - 1, np.uint32)

    plans = scheduler(step_tokens=4)
    plans.add(request(0, 6, constraint=Anything()))
    first, second, third = plans.plan(), plans.plan(), plans.plan()
    assert (first.late, second.late, third.late) == (False, True, True)  # the first samples nothing
    plans.commit(first, [0])
    assert plans.generated(0) == []
    plans.commit(second, [7])
    assert plans.generated(0) == [7] and plans.generated(9) is None


def test_what_can_never_run_is_refused_with_the_numbers():
    plans = scheduler(num_global_pages=5, num_penalty_rows=0)
    with pytest.raises(RequestError, match="max_tokens: 21 positions to compute, allowed at most 20") as caught:
        plans.add(request(0, 10, max_tokens=12))
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError, match="^prompt: "):
        plans.add(request(0, 21, score=True))
    with pytest.raises(RequestError, match="^frequency_penalty: 0.5, allowed 0.0: "):
        plans.add(request(0, 3, max_tokens=1, frequency_penalty=0.5))
    plans.add(request(0, 10, max_tokens=11))
    with pytest.raises(ValueError, match="request id 0 is in use"):
        plans.add(request(0, 3, max_tokens=1))


def test_plans_are_committed_in_order_and_with_one_token_a_row():
    plans = scheduler()
    plans.add(request(0, 3))
    first, second = plans.plan(), plans.plan()
    with pytest.raises(ValueError, match="out of order"):
        plans.commit(second, [5])
    with pytest.raises(ValueError, match="tokens: 2 entries, allowed 1"):
        plans.commit(first, [5, 5])
    plans.commit(first, [5])
    with pytest.raises(ValueError, match="out of order"):
        plans.commit(first, [5])


@pytest.mark.parametrize(
    "changes", [{"num_window_pages": 1}, {"step_tokens": 3}, {"step_tokens": 33}, {"num_global_pages": 0}]
)
def test_sizes_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
        scheduler(**changes)


def test_check_finds_a_broken_invariant():
    plans = scheduler()
    plans.add(request(0, 3))
    plans.plan()
    plans.check()
    plans.window_pool.allocate(0)
    with pytest.raises(AssertionError, match="row 0: its window pages are its own"):
        plans.check()
