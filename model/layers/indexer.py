"""The indexer: which compressed groups each query reads (spec section 6)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rorqual.cache.layout import CacheLayout
from rorqual.cache.pools import RowPool, read_rows
from rorqual.model.config import ModelConfig
from rorqual.model.kernels.cache_rows.reference import unpack_key
from rorqual.model.kernels.index_select.reference import (
    NONE,
    index_scores,
    merge_best,
    merge_blocks,
    no_selection,
)
from rorqual.model.layers.context import slots_of
from rorqual.model.layers.linear import Fp8Linear, Linear, RMSNorm, Weights
from rorqual.model.numerics import F32, bf16
from rorqual.model.quantise import fp4_key_roundtrip
from rorqual.model.rope import rotate

GROUP_CHUNK = 512


class Query(NamedTuple):
    """Index queries of a tile: `q [t, n, d]` and head weights `w [t, n]` bfloat16, `visible [t]` groups it may see."""

    q: jax.Array
    w: jax.Array
    visible: jax.Array


class KeyPages(NamedTuple):
    """Where the keys are: pool, source number in it, page table, seats `[t]`, rows per page, row layout."""

    pool: RowPool
    source: jax.Array
    pages: jax.Array
    seat: jax.Array
    rows_per_page: int
    layout: CacheLayout

    def read(self, group: jax.Array) -> jax.Array:
        """Keys of groups `[t, g]` -> bfloat16 `[t, g, d]`."""
        slots = slots_of(self.pages, self.seat, group, self.rows_per_page)
        row = self.layout.key_row
        return unpack_key(read_rows(self.pool, self.source, slots, row), row)


class Selection(NamedTuple):
    """What an index source publishes: `picks [T, K]` groups (-1: empty), `blocks [T, B]` candidate blocks, rising."""

    picks: jax.Array
    blocks: jax.Array


class Indexer(nnx.Module):
    """Queries of an index source; keys too where it owns the KV."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.wq_b = Fp8Linear(weights["wq_b"])
        self.weights_proj = Linear(weights["weights_proj"])
        self.wk = Linear(weights["wk"]) if "wk" in weights else None
        self.k_norm = RMSNorm(weights["k_norm"], config.norm_eps) if "k_norm" in weights else None
        self.config = config

    def keys(self, latent: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Latents before RoPE `[t, C]` -> rotated keys bfloat16 `[t, d]`, before quantisation."""
        assert self.wk is not None and self.k_norm is not None
        return rotate(self.k_norm(self.wk(latent)), cos, sin)

    def rotated_queries(self, qr: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """`qr [t, q_lora_rank]` (FP8 round-tripped) -> bfloat16 `[t, n, d]`, before quantisation."""
        q = self.wq_b(qr).reshape(qr.shape[0], self.config.index_n_heads, self.config.index_head_dim)
        return rotate(q, cos, sin)

    def head_weights(self, x: jax.Array) -> jax.Array:
        """`x [t, D]` -> bfloat16 `[t, n]`, rounded after the projection and after the factor."""
        factor = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        return bf16(self.weights_proj(x).astype(F32) * factor)

    def query(self, x: jax.Array, qr: jax.Array, cos: jax.Array, sin: jax.Array, visible: jax.Array) -> Query:
        return Query(fp4_key_roundtrip(self.rotated_queries(qr, cos, sin)), self.head_weights(x), visible)


def _chunk_loop(num_groups: jax.Array, chunk: int, body: Callable, carry: tuple) -> tuple:
    """`carry = body(first, carry)` for chunks of groups up to the longest row of the tile."""
    return lax.fori_loop(0, (num_groups + chunk - 1) // chunk, lambda i, c: body(i * chunk, c), carry)


def chunk_size(max_groups: int, block_size: int) -> int:
    """Groups scored at a time: whole candidate blocks, no more than the longest context has."""
    chunk = min(GROUP_CHUNK, max_groups)
    return -(-chunk // block_size) * block_size


def select_from_all(query: Query, keys: KeyPages, config: ModelConfig, make_blocks: bool) -> Selection:
    """Best groups of everything visible; with `make_blocks` the candidate blocks too (else none)."""
    num_queries = query.visible.shape[0]
    chunk = chunk_size(keys.pages.shape[1] * keys.rows_per_page, config.candidate_block_size)
    empty = no_selection(num_queries, config.index_topk), no_selection(num_queries, config.candidate_topk_blocks)

    def one_chunk(first: jax.Array, best: tuple) -> tuple:
        group = jnp.broadcast_to(first + jnp.arange(chunk, dtype=jnp.int32), (num_queries, chunk))
        scores = index_scores(query.q, keys.read(group), query.w)
        scores = jnp.where(group < query.visible[:, None], scores, -jnp.inf)
        groups, blocks = merge_best(best[0], scores, group), best[1]
        if make_blocks:
            blocks = merge_blocks(blocks, scores, first, query.visible, config.candidate_block_size)
        return groups, blocks

    groups, blocks = _chunk_loop(jnp.max(query.visible), chunk, one_chunk, empty)
    return Selection(groups[1], blocks[1])


def select_from_blocks(query: Query, keys: KeyPages, config: ModelConfig, blocks: jax.Array) -> jax.Array:
    """Best groups inside candidate blocks `[t, B]` (rising, -1: empty) -> picks int32 `[t, K]`."""
    size = config.candidate_block_size
    num_queries, num_blocks = blocks.shape
    per_chunk = min(max(GROUP_CHUNK // size, 1), num_blocks)
    padded = jnp.pad(blocks, ((0, 0), (0, -num_blocks % per_chunk)), constant_values=NONE)
    used = jnp.max(jnp.sum(blocks >= 0, 1))

    def one_chunk(first: jax.Array, best: tuple) -> tuple:
        block = lax.dynamic_slice_in_dim(padded, first, per_chunk, 1)
        group = (block[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(num_queries, -1)
        there = jnp.repeat(block >= 0, size, 1) & (group < query.visible[:, None])
        scores = index_scores(query.q, keys.read(jnp.maximum(group, 0)), query.w)
        return merge_best(best, jnp.where(there, scores, -jnp.inf), group)

    return _chunk_loop(used, per_chunk, one_chunk, no_selection(num_queries, config.index_topk))[1]
