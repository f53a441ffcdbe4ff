"""The device state that outlives a step: page pools and seats. One pytree, donated to every program that changes it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.cache.pools import Pools, abstract_pools
from rorqual.model.forward import Program
from rorqual.serve.step_input import FLOATS, INTEGERS, FillShape

I32, F32 = jnp.int32, jnp.float32


class SeatParams(NamedTuple):
    """Sampling parameters by seat: `floats [S, 6]`, `integers [S, 7]`, `stop_ids [S, K]`, `bias_ids`, `bias_values`
    `[S, B]`. Columns: step_input.FLOATS and INTEGERS."""

    floats: jax.Array
    integers: jax.Array
    stop_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array

    def column(self, name: str) -> jax.Array:
        """One named column `[S]` (or `[R]` after a gather)."""
        if name in FLOATS:
            return self.floats[:, FLOATS.index(name)]
        return self.integers[:, INTEGERS.index(name)]


class Seats(NamedTuple):
    """Running requests, by seat.

    `global_pages`, `window_pages` int32 `[S, P]` by position // page size; `computed [S]` tokens whose rows are in the
    cache; `last_token [S]` sampled and not fed yet; `history [S, n]` the last fed token ids, newest first (-1: none);
    `pairs` float32 `[sources, S, 2, C]` half-filled pairs of ratio-2 sources.
    """

    global_pages: jax.Array
    window_pages: jax.Array
    computed: jax.Array
    last_token: jax.Array
    history: jax.Array
    pairs: jax.Array
    params: SeatParams


class State(NamedTuple):
    """Pools, seats, and the token counts of requests with penalties: int32 `[N, V]` generated and prompt tokens."""

    pools: Pools
    seats: Seats
    counts: jax.Array
    seen: jax.Array


class StateSizes(NamedTuple):
    """Sizes that the state is made of, per rank."""

    num_seats: int
    num_global_pages: int
    num_window_pages: int
    pages_per_seat: int
    num_penalty_rows: int
    fill: FillShape


def abstract_state(program: Program, sizes: StateSizes) -> State:
    """Shapes and types of the state."""
    config, seats = program.config, sizes.num_seats

    def array(shape: tuple[int, ...], dtype: Any = I32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    halves = [len(group.layers) for group in program.layout.groups if group.ratio == 2]
    params = SeatParams(
        array((seats, len(FLOATS)), F32),
        array((seats, len(INTEGERS))),
        array((seats, sizes.fill.num_stop_ids)),
        array((seats, sizes.fill.num_bias)),
        array((seats, sizes.fill.num_bias), F32),
    )
    return State(
        abstract_pools(program.layout, sizes.num_global_pages, sizes.num_window_pages),
        Seats(
            array((seats, sizes.pages_per_seat)),
            array((seats, sizes.pages_per_seat)),
            array((seats,)),
            array((seats,)),
            array((seats, config.engram.max_ngram - 1)),
            array((sum(halves), seats, 2, config.head_dim), F32),
            params,
        ),
        array((sizes.num_penalty_rows, config.vocab_size)),
        array((sizes.num_penalty_rows, config.vocab_size)),
    )


def state_axes(state: State) -> State:
    """Logical axes of every array of the state, as a tree of tuples."""
    by_seat = jax.tree.map(lambda x: ("seat", *(None,) * (len(x.shape) - 1)), state.seats)
    counts: Any = ("penalty_row", None)
    return State(
        jax.tree.map(lambda _: (None, "line", None), state.pools),
        by_seat._replace(pairs=(None, "seat", None, None)),
        counts,
        counts,
    )


def fill_seats(state: State, fill: jax.Array, shape: FillShape) -> State:
    """Give seats to requests: `fill` int32 `[n, length]`, one row a seat (FillShape; a seat beyond the last: unused).

    Clears what the seat's last request left; penalty rows too.
    """
    seat, seats = fill[:, 0], state.seats
    integers = fill[:, 1 : shape.stop_at]
    floats = lax.bitcast_convert_type(fill[:, shape.floats_at : shape.values_at], F32)

    def put(array: jax.Array, value: Any) -> jax.Array:
        return array.at[seat].set(value, mode="drop")

    params = SeatParams(
        put(seats.params.floats, floats),
        put(seats.params.integers, integers),
        put(seats.params.stop_ids, fill[:, shape.stop_at : shape.bias_at]),
        put(seats.params.bias_ids, fill[:, shape.bias_at : shape.floats_at]),
        put(seats.params.bias_values, lax.bitcast_convert_type(fill[:, shape.values_at :], F32)),
    )
    row = integers[:, INTEGERS.index("penalty_row")]
    row = jnp.where(row < 0, state.counts.shape[0], row)
    return state._replace(
        seats=seats._replace(
            computed=put(seats.computed, 0),
            last_token=put(seats.last_token, 0),
            history=put(seats.history, -1),
            params=params,
        ),
        counts=state.counts.at[row].set(0, mode="drop"),
        seen=state.seen.at[row].set(0, mode="drop"),
    )
