"""The step: every row of the batch advances by its new tokens, in one program.

Its body is one rank's program. It reads top to bottom: unpack what the host sent, derive the flat batch from counts and
seats, run the backbone over pages, sample, remember what the next step needs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from rorqual.model.forward import Inputs, Params, Program, backbone, logits
from rorqual.model.layers.block import Hidden
from rorqual.model.layers.context import CacheState, Tables, Tokens
from rorqual.model.layers.tiles import over_tiles, put, take
from rorqual.model.sampling import Sampled, Sampling, nothing_sampled, sample
from rorqual.serve.state import Seats, State
from rorqual.serve.step_input import (
    COUNT,
    FLAGS,
    FROM_SEAT,
    MASKED,
    ROW_FIELDS,
    SAMPLES,
    SEAT,
    START,
    UPDATE_FIELDS,
    StepShape,
)
from rorqual.sharding.mesh import RANK


class StepInput(NamedTuple):
    """What the host sends: `packed` int32 `[ranks, length]` (step_input.StepShape), and the late input `mask` uint32
    `[ranks, R, ceil(V / 32)]` of constrained rows (an idle array when there are none)."""

    packed: jax.Array
    mask: jax.Array


class StepOutput(NamedTuple):
    """By rank and row: `packed` int32 `[ranks, R, 2 + 2 * alternatives]` token, log-probability bits, alternative ids,
    their log-probability bits. `logits` float32 `[ranks, T, V]` in the scoring variant, else None."""

    packed: jax.Array
    logits: jax.Array | None


@dataclass(frozen=True)
class StepConfig:
    """Static side of one step program."""

    program: Program
    shape: StepShape
    mesh: Mesh
    params_specs: tuple[PartitionSpec, ...]
    state_specs: tuple[PartitionSpec, ...]
    score: bool


class Rows(NamedTuple):
    """Rows of the step, every array `[R]`: unused rows have count 0 and a seat beyond the last."""

    seat: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    start: jax.Array
    from_seat: jax.Array
    samples: jax.Array
    masked: jax.Array
    first: jax.Array  # place of the row's first token in the flat batch
    row_of: jax.Array  # int32 [T] row of each token (the last row for padding)


def _read_rows(packed: jax.Array, seats: Seats, shape: StepShape) -> Rows:
    fields = packed[: shape.tokens_at].reshape(shape.num_rows, ROW_FIELDS)
    seat, count, start, flags = fields[:, SEAT], fields[:, COUNT], fields[:, START], fields[:, FLAGS]
    from_seat = start == FROM_SEAT
    computed = jnp.take(seats.computed, seat, mode="clip")
    end = jnp.cumsum(count)
    place = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    row_of = jnp.sum(place[:, None] >= end[None, :], 1)
    return Rows(
        seat,
        count,
        jnp.where(from_seat, computed, start),
        from_seat,
        (flags & SAMPLES) > 0,
        (flags & MASKED) > 0,
        end - count,
        jnp.minimum(row_of, shape.num_rows - 1),
    )


def _flat_batch(packed: jax.Array, rows: Rows, seats: Seats, shape: StepShape, image_token_id: int) -> Tokens:
    """Token, position and seat of every place, from the rows' counts, the seats and the host's tokens."""
    place = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    valid = place < jnp.sum(rows.count)
    row = rows.row_of
    within = place - rows.first[row]
    from_host = jnp.where(rows.from_seat, 0, rows.count)
    host_first = jnp.cumsum(from_host) - from_host
    host_tokens = lax.dynamic_slice_in_dim(packed, shape.tokens_at, shape.num_tokens)
    host_token = jnp.take(host_tokens, host_first[row] + within, mode="clip")
    seat = jnp.minimum(rows.seat[row], seats.computed.shape[0] - 1)
    token = jnp.where(rows.from_seat[row], seats.last_token[seat], host_token)
    token = jnp.where(valid, token, 0)
    return Tokens(
        token=token,
        position=jnp.where(valid, rows.start[row] + within, 0),
        seat=seat,
        follows=valid & (within > 0),
        ends=valid & (within == rows.count[row] - 1),
        valid=valid,
        image=valid & (token == image_token_id),
    )


def _update_pages(packed: jax.Array, seats: Seats, shape: StepShape) -> Seats:
    """Enter the new pages into the tables (unused updates name a seat beyond the last and are dropped)."""
    updates = packed[shape.updates_at :].reshape(shape.num_updates, UPDATE_FIELDS)
    at = updates[:, 0], updates[:, 1]
    return seats._replace(
        global_pages=seats.global_pages.at[at].set(updates[:, 2], mode="drop"),
        window_pages=seats.window_pages.at[at].set(updates[:, 3], mode="drop"),
    )


def _sampling(seats: Seats, rows: Rows) -> tuple[Sampling, jax.Array, jax.Array]:
    """Sampling parameters of each row, its penalty row (-1: none), and whether it wants log-probabilities."""
    params = jax.tree.map(lambda x: jnp.take(x, rows.seat, 0, mode="clip"), seats.params)
    column = params.column
    num_generated = rows.start + rows.count - column("num_prompt")
    too_early = rows.samples & (num_generated < column("min_tokens"))
    words = jnp.stack([column("seed_high"), column("seed_low")], 1)
    sampling = Sampling(
        temperature=jnp.where(rows.samples, column("temperature"), 0),
        top_p=column("top_p"),
        min_p=column("min_p"),
        presence=column("presence"),
        frequency=column("frequency"),
        repetition=column("repetition"),
        top_k=column("top_k"),
        seed=lax.bitcast_convert_type(words, jnp.uint32),
        bias_ids=jnp.where(rows.samples[:, None], params.bias_ids, -1),
        bias_values=params.bias_values,
        banned=jnp.where(too_early[:, None], params.stop_ids, -1),
    )
    penalty_row = jnp.where(rows.samples, column("penalty_row"), -1)
    return sampling, penalty_row, rows.samples & (column("wants_logprobs") > 0)


def _sample_rows(
    row_logits: jax.Array, mask: jax.Array, rows: Rows, num_rows: jax.Array, state: State, program: Program
) -> Sampled:
    """A token for every row, `num_rows` of them in use; sums over the vocabulary run over row tiles like all others."""
    sampling, penalty_row, wants_logprobs = _sampling(state.seats, rows)
    masked = rows.masked & rows.samples
    inputs = (row_logits, sampling, penalty_row, mask, masked, rows.start + rows.count, wants_logprobs)
    tile = program.tiles.rows

    def one_tile(start: jax.Array, sampled: Sampled) -> Sampled:
        scores, params, count_row, mask, masked, position, wanted = take(inputs, start, tile)
        counted = state.counts, state.seen, count_row
        return put(sampled, sample(scores, params, counted, mask, masked, position, wanted), start)

    return over_tiles(num_rows, tile, one_tile, nothing_sampled(row_logits.shape[0]))


def _count_tokens(state: State, tokens: Tokens) -> State:
    """Count the fed tokens of rows with penalties, prompt and generated ones apart."""
    params = state.seats.params
    row = jnp.take(params.column("penalty_row"), tokens.seat)
    in_prompt = tokens.position < jnp.take(params.column("num_prompt"), tokens.seat)
    counted = tokens.valid & (row >= 0)
    nowhere = state.counts.shape[0]

    def add(counts: jax.Array, where: jax.Array) -> jax.Array:
        return counts.at[jnp.where(where, row, nowhere), tokens.token].add(1, mode="drop")

    return state._replace(counts=add(state.counts, counted & ~in_prompt), seen=add(state.seen, counted & in_prompt))


def _new_history(seats: Seats, rows: Rows, tokens: Tokens) -> jax.Array:
    """Last fed token ids of each row after this step, newest first `[R, n]`."""
    old = jnp.take(seats.history, rows.seat, 0, mode="clip")
    back = jnp.arange(old.shape[1])
    place = rows.first[:, None] + rows.count[:, None] - 1 - back
    fed = jnp.take(tokens.token, jnp.maximum(place, 0), mode="clip")
    earlier = jnp.take_along_axis(old, jnp.clip(back - rows.count[:, None], 0, old.shape[1] - 1), 1)
    return jnp.where(back < rows.count[:, None], fed, earlier)


def _advance(seats: Seats, rows: Rows, tokens: Tokens, pairs: jax.Array, sampled: jax.Array) -> Seats:
    """Seats after the step."""
    sampling_seat = jnp.where(rows.samples, rows.seat, seats.computed.shape[0])
    return seats._replace(
        computed=seats.computed.at[rows.seat].set(rows.start + rows.count, mode="drop"),
        last_token=seats.last_token.at[sampling_seat].set(jnp.maximum(sampled, 0), mode="drop"),
        history=seats.history.at[rows.seat].set(_new_history(seats, rows, tokens), mode="drop"),
        pairs=pairs,
    )


def _pack_output(sampled: Sampled) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    columns = [sampled.token[:, None], bits(sampled.logprob)[:, None]]
    return jnp.concatenate([*columns, sampled.alternative_ids, bits(sampled.alternative_logprobs)], 1)


def rank_step(params: Params, state: State, batch: StepInput, config: StepConfig) -> tuple[State, StepOutput]:
    """One rank's program: its own rows, seats and pages (arrays without the rank axis but for `batch`)."""
    program, shape = config.program, config.shape
    packed, mask = batch.packed[0], batch.mask[0]
    seats = _update_pages(packed, state.seats, shape)
    rows = _read_rows(packed, seats, shape)
    tokens = _flat_batch(packed, rows, seats, shape, program.config.image_token_id)
    history = jnp.take(seats.history, tokens.seat, 0)
    inputs = Inputs(tokens, Tables(seats.global_pages, seats.window_pages), history)
    hidden, cache = backbone(params, CacheState(state.pools, seats.pairs), inputs, program)

    state = _count_tokens(state._replace(seats=seats), tokens)
    last = jnp.clip(rows.first + rows.count - 1, 0, shape.num_tokens - 1)
    num_rows = jnp.sum(rows.count > 0)
    row_logits = logits(params, Hidden(hidden.stream[last], hidden.pre[last]), num_rows, program)
    sampled = _sample_rows(row_logits, mask, rows, num_rows, state, program)
    seats = _advance(seats, rows, tokens, cache.pairs, sampled.token)
    every_logit = logits(params, hidden, jnp.sum(rows.count), program)[None] if config.score else None
    return state._replace(pools=cache.pools, seats=seats), StepOutput(_pack_output(sampled)[None], every_logit)


@partial(jax.jit, donate_argnames="state", static_argnames="config")
def step(params: Params, state: State, batch: StepInput, *, config: StepConfig) -> tuple[State, StepOutput]:
    """Advance every row by its new tokens: (params, state, batch) -> (state, StepOutput)."""
    params_specs = jax.tree.unflatten(jax.tree.structure(params), config.params_specs)
    state_specs = jax.tree.unflatten(jax.tree.structure(state), config.state_specs)
    by_rank: Any = PartitionSpec(RANK)
    output_specs = StepOutput(by_rank, by_rank if config.score else None)
    body = jax.shard_map(
        partial(rank_step, config=config),
        mesh=config.mesh,
        in_specs=(params_specs, state_specs, StepInput(by_rank, by_rank)),
        out_specs=(state_specs, output_specs),
        check_vma=False,
    )
    return body(params, state, batch)
