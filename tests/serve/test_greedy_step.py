"""What sampling runs for greedy, drawing and log-probability rows: conditions are decided from real seats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from rorqual.model.sampling import sample
from rorqual.serve.pack import fill_row
from rorqual.serve.request import Request, SamplingParams
from rorqual.serve.schedule import Admission
from rorqual.serve.state import SeatParams, Seats, State, fill_seats
from rorqual.serve.step import Rows, _sampling
from rorqual.serve.step_input import FLOATS, INTEGERS, FillShape

FILL = FillShape(num_stop_ids=6, num_bias=8)
NUM_SEATS, NUM_ROWS, VOCAB = 6, 4, 96
SORTS = {"sort", "top_k", "approx_top_k"}


def run(jaxpr: Any, consts: list, args: list, ran: set[str]) -> list:
    """Evaluate a jaxpr equation by equation, taking the branches its conditions choose; note what ran."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        name, params = equation.primitive.name, equation.params
        ran.add(name)
        if name == "cond":
            branch = params["branches"][int(inputs[0])]
            outputs = run(branch.jaxpr, branch.consts, inputs[1:], ran)
        elif name in ("jit", "pjit"):
            outputs = run(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs, ran)
        else:
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def empty_state() -> State:
    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    params = SeatParams(
        zeros(NUM_SEATS, len(FLOATS), dtype=jnp.float32),
        zeros(NUM_SEATS, len(INTEGERS)),
        zeros(NUM_SEATS, FILL.num_stop_ids),
        zeros(NUM_SEATS, FILL.num_bias),
        zeros(NUM_SEATS, FILL.num_bias, dtype=jnp.float32),
    )
    by_seat = zeros(NUM_SEATS)
    seats = Seats(zeros(NUM_SEATS, 4), zeros(NUM_SEATS, 4), by_seat, by_seat, zeros(NUM_SEATS, 3), by_seat, params)
    return State(None, seats, zeros(2, VOCAB), zeros(2, VOCAB))


def what_runs(samples: list[bool], *params: SamplingParams) -> set[str]:
    """Primitives that sampling runs for one row a request, on seats filled as the engine fills them."""
    requests = [Request(i, np.arange(1, 4, dtype=np.int32), p, eos_ids=(1,)) for i, p in enumerate(params)]
    fill = np.full((NUM_SEATS, FILL.length), -1, np.int32)
    fill[:, 0] = NUM_SEATS
    for seat, request in enumerate(requests):
        row = seat % 2 if request.params.uses_penalties else -1
        fill[seat] = fill_row(Admission(seat, request, row), 7, FILL)
    state = fill_seats(empty_state(), jnp.asarray(fill), FILL)
    unused = NUM_ROWS - len(params)
    seat = jnp.array([*range(len(params)), *[NUM_SEATS] * unused], jnp.int32)
    count = jnp.array([3] * len(params) + [0] * unused, jnp.int32)
    wanted = jnp.array(samples + [False] * unused)
    nothing = jnp.zeros(NUM_ROWS, bool)
    rows = Rows(seat, count, jnp.zeros_like(count), nothing, wanted, nothing, jnp.cumsum(count) - count, seat)
    sampling, penalty_row, wants_logprobs = _sampling(state.seats, rows)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_ROWS, VOCAB)), jnp.float32)
    mask = jnp.zeros((NUM_ROWS, VOCAB // 32), jnp.uint32)
    counted = state.counts, state.seen, penalty_row
    args = (logits, sampling, counted, mask, nothing, rows.start + rows.count, wants_logprobs)
    closed = jax.make_jaxpr(sample)(*args)
    ran: set[str] = set()
    token = run(closed.jaxpr, closed.consts, jax.tree.leaves(args), ran)[0]
    np.testing.assert_array_equal(token, sample(*args).token)
    return ran


GREEDY = SamplingParams(temperature=0)
EXPENSIVE = SORTS | {"random_bits", "threefry2x32", "exp", "log", "while", "scan"}


def test_greedy_rows_sort_and_draw_nothing():
    assert not what_runs([True, True], GREEDY, GREEDY) & EXPENSIVE


def test_filters_of_a_greedy_request_run_nothing():
    """A top-p or seed beside temperature 0 changes nothing, so it costs nothing."""
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=11)
    assert not what_runs([True], params) & EXPENSIVE


def test_a_row_that_does_not_sample_yet_runs_nothing():
    """The chunks of a long prompt ask for nothing before the last one."""
    drawing = SamplingParams(temperature=1.0, top_p=0.5, logprobs=3, frequency_penalty=1.0, logit_bias=((4, 2.0),))
    assert not what_runs([False, True], drawing, GREEDY) & (EXPENSIVE | {"scatter", "scatter-add"})


@pytest.mark.parametrize(
    ("params", "runs", "skips"),
    [
        (SamplingParams(temperature=1.0), {"log"}, SORTS),
        (SamplingParams(temperature=1.0, top_p=0.5), {"log", "exp"}, SORTS),
        (SamplingParams(temperature=0, logprobs=2), {"top_k"}, {"threefry2x32", "random_bits"}),
        (SamplingParams(temperature=0, logit_bias=((4, 2.0),)), {"scatter-add"}, SORTS),
        (SamplingParams(temperature=0, min_tokens=3), {"scatter"}, SORTS),
        (SamplingParams(temperature=0, repetition_penalty=1.5), {"gather", "div"}, SORTS | {"scatter"}),
    ],
)
def test_a_row_pays_for_what_it_asks(params: SamplingParams, runs: set[str], skips: set[str]):
    ran = what_runs([True, True], GREEDY, params)
    assert runs <= ran
    assert not skips & ran
