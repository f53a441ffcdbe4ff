"""What the host packs is what the device reads: small device functions against a plain account of the plan."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.model.sampling import Sampled
from rorqual.serve.limits import Limits
from rorqual.serve.pack import NUM_ALTERNATIVES, constrained, fill_row, masks, pack_step, unpack_output
from rorqual.serve.request import Request, SamplingParams
from rorqual.serve.schedule import Admission, PageUpdate, RowPlan, StepPlan
from rorqual.serve.state import SeatParams, Seats, State, fill_seats
from rorqual.serve.step import _flat_batch, _pack_output, _read_rows, _update_pages
from rorqual.serve.step_input import FILL_SEATS, FLOATS, INTEGERS, FillShape, StepShape

NUM_SEATS, PAGES, VOCAB, IMAGE, HISTORY = 6, 5, 70, 66, 3
SHAPE = StepShape(num_tokens=16, num_rows=5, page_size=4)
FILL = FillShape(num_stop_ids=5, num_bias=4)
LIMITS = Limits(VOCAB, 100, 5, 16, 4)


class Allow:
    """A constraint that allows one token after the other."""

    def mask(self, generated: Any) -> np.ndarray:
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        words[len(generated) // 32] = 1 << (len(generated) % 32)
        return words


def seats_of(rng: np.random.Generator) -> Seats:
    """Seats as some earlier steps may have left them."""

    def integers(*shape: int, low: int = 0, high: int = 50) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = SeatParams(
        floats(NUM_SEATS, len(FLOATS)),
        integers(NUM_SEATS, len(INTEGERS)),
        integers(NUM_SEATS, FILL.num_stop_ids),
        integers(NUM_SEATS, FILL.num_bias),
        floats(NUM_SEATS, FILL.num_bias),
    )
    pages = integers(NUM_SEATS, PAGES), integers(NUM_SEATS, PAGES)
    history = integers(NUM_SEATS, HISTORY, low=-1, high=VOCAB)
    return Seats(*pages, integers(NUM_SEATS), integers(NUM_SEATS, high=VOCAB), history, floats(1, 6, 2, 3), params)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Any plan that fits the shape: decode rows first, chunks after them; none at all, and full ones too."""
    seats = draw(st.permutations(range(NUM_SEATS)))[: draw(st.integers(0, SHAPE.num_rows))]
    num_decode = draw(st.integers(0, len(seats)))
    room = SHAPE.num_tokens - len(seats)
    rows, tokens = [], []
    for place, seat in enumerate(seats):
        request = Request(place, np.array([1, 2], np.int32), draw(params_of()))
        if place < num_decode:
            rows.append(RowPlan(request, seat, draw(st.integers(1, 90)), 1, True, True))
            continue
        last = place == len(seats) - 1
        more = room if last and draw(st.booleans()) else draw(st.integers(0, room))
        room -= more
        rows.append(RowPlan(request, seat, draw(st.integers(0, 70)), 1 + more, False, draw(st.booleans())))
        tokens += draw(st.lists(st.integers(0, VOCAB - 1), min_size=1 + more, max_size=1 + more))
    places = st.tuples(st.integers(0, NUM_SEATS - 1), st.integers(0, PAGES - 1))
    pairs = draw(st.lists(places, unique=True, max_size=SHAPE.num_updates))
    page = st.integers(0, 1000)
    updates = [PageUpdate(seat, index, draw(page), draw(page)) for seat, index in pairs]
    return StepPlan(rows, np.array(tokens, np.int32), updates, [], SHAPE.num_tokens, False, False)


def params_of() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams, constraint=st.sampled_from([None, Allow()]), logprobs=st.sampled_from([None, 0, 3])
    )


read_rows = jax.jit(partial(_read_rows, shape=SHAPE))
flat_batch = jax.jit(partial(_flat_batch, shape=SHAPE, image_token_id=IMAGE))
update_pages = jax.jit(partial(_update_pages, shape=SHAPE))
fill_program = jax.jit(partial(fill_seats, shape=FILL))


@settings(deadline=None)
@given(plan=plans(), seed=st.integers(0, 1000))
def test_the_device_reads_every_row(plan: StepPlan, seed: int):
    seats = seats_of(np.random.default_rng(seed))
    rows = jax.tree.map(np.asarray, read_rows(pack_step(plan, SHAPE, NUM_SEATS), seats))
    first = 0
    for place, row in enumerate(plan.rows):
        assert (rows.seat[place], rows.count[place], rows.first[place]) == (row.seat, row.count, first)
        assert rows.start[place] == (seats.computed[row.seat] if row.from_seat else row.start)
        assert rows.from_seat[place] == row.from_seat
        assert rows.samples[place] == row.sample
        assert rows.masked[place] == constrained(row)
        assert (rows.row_of[first : first + row.count] == place).all()
        first += row.count
    unused = slice(len(plan.rows), None)
    assert (rows.seat[unused] == NUM_SEATS).all() and (rows.count[unused] == 0).all()
    assert not rows.samples[unused].any() and not rows.masked[unused].any()
    assert (rows.row_of >= 0).all() and (rows.row_of < SHAPE.num_rows).all()


@settings(deadline=None)
@given(plan=plans(), seed=st.integers(0, 1000))
def test_the_device_lays_out_the_flat_batch(plan: StepPlan, seed: int):
    seats = seats_of(np.random.default_rng(seed))
    packed = jnp.asarray(pack_step(plan, SHAPE, NUM_SEATS))
    tokens = jax.tree.map(np.asarray, flat_batch(packed, read_rows(packed, seats), seats))
    host, at = iter(plan.tokens.tolist()), 0
    for row in plan.rows:
        start = int(seats.computed[row.seat]) if row.from_seat else row.start
        for within in range(row.count):
            token = int(seats.last_token[row.seat]) if row.from_seat else next(host)
            assert (tokens.token[at], tokens.position[at], tokens.seat[at]) == (token, start + within, row.seat)
            assert tokens.valid[at]
            assert (tokens.follows[at], tokens.ends[at]) == (within > 0, within == row.count - 1)
            assert tokens.image[at] == (token == IMAGE)
            at += 1
    assert next(host, None) is None
    for array in (tokens.valid, tokens.follows, tokens.ends, tokens.image):
        assert not array[at:].any()
    assert (tokens.token[at:] == 0).all() and (tokens.seat < NUM_SEATS).all() and (tokens.seat >= 0).all()


@settings(deadline=None)
@given(plan=plans(), seed=st.integers(0, 1000))
def test_the_device_enters_new_pages_and_no_others(plan: StepPlan, seed: int):
    seats = seats_of(np.random.default_rng(seed))
    updated = update_pages(pack_step(plan, SHAPE, NUM_SEATS), seats)
    pages, windows = np.array(seats.global_pages), np.array(seats.window_pages)
    for seat, index, page, window in plan.updates:
        pages[seat, index], windows[seat, index] = page, window
    np.testing.assert_array_equal(updated.global_pages, pages)
    np.testing.assert_array_equal(updated.window_pages, windows)
    kept = updated._replace(global_pages=seats.global_pages, window_pages=seats.window_pages)
    jax.tree.map(np.testing.assert_array_equal, kept, seats)


def test_a_plan_beyond_the_shape_is_refused_with_the_numbers():
    request = Request(0, np.array([1], np.int32))
    rows = [RowPlan(request, seat, 0, 1, False, True) for seat in range(6)]
    many = StepPlan(rows, np.ones(6, np.int32), [], [], 16, False, False)
    with pytest.raises(ValueError, match="6 rows and 0 page updates, allowed 5 and 9"):
        pack_step(many, SHAPE, NUM_SEATS)
    updates = [PageUpdate(0, 0, i, i) for i in range(10)]
    with pytest.raises(ValueError, match="0 rows and 10 page updates, allowed 5 and 9"):
        pack_step(StepPlan([], np.zeros(0, np.int32), updates, [], 16, False, False), SHAPE, NUM_SEATS)


@given(counts=st.lists(st.integers(1, 16), min_size=1, max_size=5), starts=st.lists(st.integers(0, 50), min_size=5))
def test_updates_have_room_for_every_page_a_step_can_reach(counts: list[int], starts: list[int]):
    """Rows that together have at most T tokens begin at most U pages."""
    if sum(counts) <= SHAPE.num_tokens:
        begun = [
            sum(p % SHAPE.page_size == 0 for p in range(start, start + count))
            for start, count in zip(starts, counts, strict=False)
        ]
        assert sum(begun) <= SHAPE.num_updates


# Seats.


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, VOCAB - 1)
    number = st.floats(-2, 2, width=32)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.25]),
        top_p=st.sampled_from([0.125, 1.0]),
        top_k=st.integers(0, 2**31 - 1),
        min_p=st.sampled_from([0.0, 0.25]),
        presence_penalty=number,
        frequency_penalty=number,
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        logit_bias=st.dictionaries(token, number, max_size=FILL.num_bias),
        logprobs=st.sampled_from([None, 0, 5]),
        stop_token_ids=st.lists(token, max_size=3, unique=True),
        min_tokens=st.integers(0, 9),
        ignore_eos=st.booleans(),
    )


@st.composite
def admissions(draw: st.DrawFn) -> list[Admission]:
    seats = draw(st.permutations(range(NUM_SEATS)))[: draw(st.integers(0, FILL_SEATS))]
    rows = draw(st.permutations(range(FILL_SEATS)))
    found = []
    for place, seat in enumerate(seats):
        prompt = np.ones(draw(st.integers(1, 90)), np.int32)
        request = Request(place, prompt, draw(sampling_params()), eos_ids=(1, 5))
        found.append(Admission(seat, request, rows[place] if request.params.uses_penalties else -1))
    return found


@settings(deadline=None)
@given(
    admitted=admissions(), seeds=st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4), noise=st.integers(0, 99)
)
def test_a_filled_seat_holds_its_request_and_nothing_older(admitted: list[Admission], seeds: list[int], noise: int):
    before = seats_of(np.random.default_rng(noise))
    counts, seen = jnp.full((FILL_SEATS, VOCAB), 7, jnp.int32), jnp.full((FILL_SEATS, VOCAB), 8, jnp.int32)
    fill = np.full((FILL_SEATS, FILL.length), -1, np.int32)
    fill[:, 0] = NUM_SEATS
    for place, admission in enumerate(admitted):
        fill[place] = fill_row(admission, seeds[place], FILL)
    state = fill_program(State(None, before, counts, seen), fill)
    after = state.seats
    for admission, seed in zip(admitted, seeds, strict=False):
        check_seat(after, admission, seed)
    others = [seat for seat in range(NUM_SEATS) if seat not in {a.seat for a in admitted}]
    by_seat = before._replace(pairs=before.pairs.swapaxes(0, 1)), after._replace(pairs=after.pairs.swapaxes(0, 1))
    for old, new in zip(*map(jax.tree.leaves, by_seat), strict=True):
        np.testing.assert_array_equal(np.asarray(old)[others], np.asarray(new)[others])
    cleared = {a.penalty_row for a in admitted} - {-1}
    for row in range(FILL_SEATS):
        assert (np.asarray(state.counts)[row] == (0 if row in cleared else 7)).all()
        assert (np.asarray(state.seen)[row] == (0 if row in cleared else 8)).all()


def check_seat(seats: Seats, admission: Admission, seed: int) -> None:
    seat, params = admission.seat, admission.request.params

    def column(name: str) -> Any:
        return np.asarray(seats.params.column(name))[seat]

    assert (int(seats.computed[seat]), int(seats.last_token[seat])) == (0, 0)
    assert (np.asarray(seats.history)[seat] == -1).all()
    assert column("temperature") == np.float32(0.0 if params.temperature < 1e-5 else params.temperature)
    for name in ("top_p", "min_p"):
        assert column(name) == np.float32(getattr(params, name))
    for name in ("presence", "frequency", "repetition"):
        assert column(name) == np.float32(getattr(params, name + "_penalty"))
    words = np.array([column("seed_low"), column("seed_high")], np.int32).view(np.uint32)
    assert int(words[0]) | int(words[1]) << 32 == seed
    assert column("top_k") == params.top_k and column("min_tokens") == params.min_tokens
    assert column("num_prompt") == len(admission.request.prompt)
    assert column("wants_logprobs") == (params.logprobs is not None)
    assert column("penalty_row") == admission.penalty_row
    stops = {int(token) for token in np.asarray(seats.params.stop_ids)[seat]} - {-1}
    assert stops == set(params.stop_token_ids) | (set() if params.ignore_eos else {1, 5})
    ids, values = np.asarray(seats.params.bias_ids)[seat], np.asarray(seats.params.bias_values)[seat]
    assert {int(i): v for i, v in zip(ids, values, strict=True) if i >= 0} == {
        i: np.float32(v) for i, v in params.logit_bias
    }
    assert (values[ids < 0] == 0).all()


# Tokens and masks.


@given(plan=plans(), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_tokens_and_logprobs_come_back_bit_for_bit(plan: StepPlan, seed: int):
    rng = np.random.default_rng(seed)
    rows, width = SHAPE.num_rows, NUM_ALTERNATIVES
    ids = rng.integers(0, VOCAB, (rows, width)).astype(np.int32)
    ids[:, 2:] = np.where(rng.random((rows, 1)) < 0.3, -1, ids[:, 2:])  # a vocabulary of two has no third best
    sampled = Sampled(
        rng.integers(-1, VOCAB, rows).astype(np.int32),
        rng.normal(size=rows).astype(np.float32),
        ids,
        rng.normal(size=(rows, width)).astype(np.float32),
    )
    tokens, logprobs = unpack_output(np.asarray(_pack_output(jax.tree.map(jnp.asarray, sampled))), plan)
    assert tokens == sampled.token[: len(plan.rows)].tolist()
    for place, (row, found) in enumerate(zip(plan.rows, logprobs, strict=True)):
        wanted = row.request.params.logprobs
        if wanted is None:
            assert found is None
            continue
        assert found is not None
        pairs = zip(ids[place, :wanted], sampled.alternative_logprobs[place, :wanted], strict=True)
        assert found[0] == sampled.logprob[place]
        assert found[1] == tuple((int(i), float(v)) for i, v in pairs if i >= 0)


@given(plan=plans(), ended=st.lists(st.booleans(), min_size=5, max_size=5))
def test_masks_allow_what_the_constraint_allows_and_everything_to_others(plan: StepPlan, ended: list[bool]):
    generated = [
        None if over else [0] * (place * 17) for place, over in zip(range(len(plan.rows)), ended, strict=False)
    ]
    found = masks(plan, generated, SHAPE.num_rows, VOCAB)
    assert found.shape == (SHAPE.num_rows, 3) and found.dtype == np.uint32
    bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    for place in range(SHAPE.num_rows):
        if place < len(plan.rows) and constrained(plan.rows[place]) and generated[place] is not None:
            assert np.flatnonzero(bits[place]).tolist() == [len(generated[place])]
        else:
            assert bits[place].all()


def test_only_rows_that_sample_wait_for_a_mask():
    request = Request(0, np.array([1], np.int32), SamplingParams(constraint=Allow()))
    free = Request(1, np.array([1], np.int32))
    rows = [(request, True), (request, False), (free, True)]
    assert [constrained(RowPlan(r, 0, 0, 1, False, sample)) for r, sample in rows] == [True, False, False]
