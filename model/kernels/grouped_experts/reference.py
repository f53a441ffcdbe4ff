"""Routed experts over a step's tokens: tiles of rows that share an expert, only experts that have tokens are read."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import BF16, F32, bf16, dot
from rorqual.model.quantise import fp8_roundtrip

COUNT_CHUNK = 64


class ExpertTiles(NamedTuple):
    """The (token, slot) pairs grouped by expert and cut into tiles.

    `pairs [num_pairs]` pair numbers, expert by expert; tile i of `num_tiles` works for `expert[i]` on the
    `size[i]` pairs from `first[i]` on.
    """

    pairs: jax.Array
    expert: jax.Array
    first: jax.Array
    size: jax.Array
    num_tiles: jax.Array


def _ranks(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """`[n]` expert of each pair (num_experts: none) -> (earlier pairs of this expert `[n]`, pairs by expert `[E]`).

    Counting by chunks instead of sorting: a sort of a few thousand keys is slow where it is not vectorised.
    """
    num_pairs = experts.shape[0]
    padded = jnp.pad(experts, (0, -num_pairs % COUNT_CHUNK), constant_values=num_experts).reshape(-1, COUNT_CHUNK)
    same = padded[:, :, None] == padded[:, None, :]
    earlier = jnp.tril(jnp.ones((COUNT_CHUNK, COUNT_CHUNK), bool), -1)
    within = jnp.sum(same & earlier, -1)
    counts = jnp.sum(padded[:, :, None] == jnp.arange(num_experts), 1)
    before = jnp.cumsum(counts, 0) - counts
    chunk = jnp.arange(padded.shape[0])[:, None]
    ranks = within + before[chunk, jnp.minimum(padded, num_experts - 1)]
    return ranks.reshape(-1)[:num_pairs], jnp.sum(counts, 0)


def group_by_expert(experts: jax.Array, num_experts: int, tile: int) -> ExpertTiles:
    """`experts [n]` int32 per pair, `num_experts` for pairs that take no part."""
    num_pairs = experts.shape[0]
    ranks, counts = _ranks(experts, num_experts)
    starts = jnp.cumsum(counts) - counts
    place = jnp.where(experts < num_experts, starts[jnp.minimum(experts, num_experts - 1)] + ranks, num_pairs)
    numbers = jnp.arange(num_pairs, dtype=jnp.int32)
    pairs = jnp.zeros(num_pairs + tile, jnp.int32).at[place].set(numbers, mode="drop")
    tiles_until = jnp.cumsum((counts + tile - 1) // tile)
    max_tiles = min(num_pairs, num_pairs // tile + num_experts)
    number = jnp.arange(max_tiles, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(tiles_until, number, side="right"), num_experts - 1).astype(jnp.int32)
    offset = (number - (tiles_until[expert] - (counts[expert] + tile - 1) // tile)) * tile
    count = jnp.clip(counts[expert] - offset, 0, tile)
    return ExpertTiles(pairs, expert, starts[expert] + offset, count, tiles_until[-1])


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """float32 silu(gate) * up, the gate clamped from above and up on both sides (limit 0: no clamp)."""
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate) * up


def expert_tile(
    x: jax.Array, weight: jax.Array, w1: jax.Array, w2: jax.Array, w3: jax.Array, limit: float
) -> jax.Array:
    """One expert on `x [B, D]` (FP8 round-tripped), routing weights `[B, 1]` float32 -> bfloat16 `[B, D]`.

    The w1 and w3 results are bf16, then float32 up to the cast before w2, routing weight included (spec section 7).
    """
    gate, up = bf16(dot(x, w1)).astype(F32), bf16(dot(x, w3)).astype(F32)
    hidden = bf16(weight * swiglu(gate, up, limit))
    return bf16(dot(fp8_roundtrip(hidden), w2))


def grouped_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    expert_weights: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
    num_experts: int,
    tile: int,
    limit: float,
) -> jax.Array:
    """`x [T, D]` bfloat16 (FP8 round-tripped), `experts [T, k]` int32 (num_experts: none), `weights [T, k]` float32,
    `expert_weights(e)` -> dense (w1, w2, w3) of one expert -> bfloat16 `[T, k, D]`, zero where there is no expert.
    """
    num_tokens, slots = experts.shape
    plan = group_by_expert(experts.reshape(-1), num_experts, tile)
    flat_weights = weights.reshape(-1, 1)
    lanes = jnp.arange(tile)

    def one_tile(i: jax.Array, y: jax.Array) -> jax.Array:
        pairs = lax.dynamic_slice_in_dim(plan.pairs, plan.first[i], tile)
        rows = jnp.take(x, pairs // slots, 0)
        result = expert_tile(rows, jnp.take(flat_weights, pairs, 0), *expert_weights(plan.expert[i]), limit)
        target = jnp.where(lanes < plan.size[i], pairs, num_tokens * slots)
        return y.at[target].set(result, mode="drop")

    y = jnp.zeros((num_tokens * slots, x.shape[1]), BF16)
    return lax.fori_loop(0, plan.num_tiles, one_tile, y).reshape(num_tokens, slots, x.shape[1])
