"""Attention of one layer (spec section 4): queries and window rows, compressed rows where it owns KV, selection where
it is an index source, the attention itself over pages, and the grouped output projection."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rorqual.cache.layout import CacheLayout
from rorqual.cache.pools import Pools, read_rows, write_rows
from rorqual.model.config import ModelConfig
from rorqual.model.kernels.cache_rows.reference import pack_key, pack_kv, pack_window, unpack_kv, unpack_window
from rorqual.model.kernels.sparse_attention.reference import attend
from rorqual.model.layers.compressor import Carry, Compressor
from rorqual.model.layers.context import CacheState, Tables, Tokens, slots_of, window_bank
from rorqual.model.layers.indexer import Indexer, KeyPages, Selection, select_from_all, select_from_blocks
from rorqual.model.layers.kinds import LayerKind, LayerNumbers
from rorqual.model.layers.linear import Fp8Linear, RMSNorm, Weights
from rorqual.model.layers.tiles import over_tiles, put, take
from rorqual.model.numerics import BF16, bf16, dot
from rorqual.model.quantise import fp8_roundtrip
from rorqual.model.rope import angles, layer_frequencies, rotate

QUERY_TILE, FEW_QUERIES = 16, 4  # queries at a time: in a step or tile of many rows, and in one of few


class Projected(NamedTuple):
    """What the input projections give: `qr [t, q_lora]` (FP8 round-tripped), `q [t, H, C]` after RoPE, `kv [t, C]`."""

    qr: jax.Array
    q: jax.Array
    kv: jax.Array


class Attention(nnx.Module):
    """One layer's attention weights, under checkpoint names."""

    def __init__(self, weights: Weights, config: ModelConfig, layout: CacheLayout, kind: LayerKind):
        self.wq_a = Fp8Linear(weights["wq_a"])
        self.wq_b = Fp8Linear(weights["wq_b"])
        self.wkv = Fp8Linear(weights["wkv"])
        self.wo_a = Fp8Linear(weights["wo_a"])
        self.wo_b = Fp8Linear(weights["wo_b"])
        self.q_norm = RMSNorm(weights["q_norm"], config.norm_eps)
        self.kv_norm = RMSNorm(weights["kv_norm"], config.norm_eps)
        self.attn_sink = nnx.Param(weights["attn_sink"])
        self.compressor = Compressor(weights["compressor"], config, kind.ratio) if kind.owns_kv else None
        self.indexer = Indexer(weights["indexer"], config) if kind.indexes else None
        self.config, self.layout, self.kind = config, layout, kind

    @property
    def frequencies(self) -> np.ndarray:
        return layer_frequencies(self.config, self.kind.ratio > 0)

    def project(self, x: jax.Array, position: jax.Array) -> Projected:
        """Normalised input `[t, D]` at positions `[t]`."""
        cos, sin = angles(position, self.frequencies)
        quantised = fp8_roundtrip(x)
        qr = fp8_roundtrip(self.q_norm(self.wq_a(quantised)))
        q = self.wq_b(qr).reshape(x.shape[0], self.config.n_heads, self.config.head_dim)
        kv = self.kv_norm(self.wkv(quantised))
        return Projected(qr, rotate(q, cos, sin), rotate(kv, cos, sin))

    def output(self, heads: jax.Array, position: jax.Array) -> jax.Array:
        """Attention result `[t, H, C]` -> rotated back, grouped projection, wo_b: bfloat16 `[t, D]`."""
        cos, sin = angles(position, self.frequencies)
        return self.wo_b(fp8_roundtrip(self.grouped_projection(rotate(heads, cos, -sin))))

    def grouped_projection(self, heads: jax.Array) -> jax.Array:
        """`[t, H, C]` -> bfloat16 `[t, groups * o_lora]`: each group of heads by its own rows of wo_a, input not
        quantised."""
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        weight = self.wo_a.dense().reshape(groups, rank, -1)
        grouped = heads.reshape(heads.shape[0], groups, -1)
        return jnp.concatenate([bf16(dot(grouped[:, group], weight[group])) for group in range(groups)], -1)

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        state: CacheState,
        tables: Tables,
        numbers: LayerNumbers,
        chosen: Selection,
        carry: Carry | None,
    ) -> tuple[jax.Array, CacheState, Selection, Carry | None]:
        """A tile of normalised inputs `[t, D]` -> (result `[t, D]`, state with the tile's rows written, selection,
        carry of the compressor). `chosen` comes from the last index source and is replaced by one."""
        projected = self.project(x, tokens.position)
        pools = self._write_window(state.pools, projected.kv, tokens, tables, numbers)
        state = CacheState(pools, state.pairs)
        if self.compressor is not None:
            state, carry = self._compress(x, tokens, state, tables, numbers, carry)
        heads, chosen = self._attend_tiles(x, projected, tokens, state.pools, tables, numbers, chosen)
        return self.output(heads, tokens.position), state, chosen, carry

    def _write_window(
        self, pools: Pools, kv: jax.Array, tokens: Tokens, tables: Tables, numbers: LayerNumbers
    ) -> Pools:
        slots = slots_of(tables.window_pages, tokens.seat, tokens.position, self.layout.page_size)
        slots = jnp.where(tokens.valid, slots, -1)
        data, scale = pack_window(kv, self.layout.window_row)
        return pools._replace(window=write_rows(pools.window, numbers.layer, slots, data, scale))

    def _compress(
        self,
        x: jax.Array,
        tokens: Tokens,
        state: CacheState,
        tables: Tables,
        numbers: LayerNumbers,
        carry: Carry | None,
    ) -> tuple[CacheState, Carry]:
        """Write the compressed rows and index keys of the groups that this tile's tokens complete."""
        assert self.compressor is not None and self.indexer is not None and carry is not None
        latent, pairs, carry = self.compressor.latents(x, tokens, state.pairs, numbers.source, carry)
        group = self.compressor.group(tokens)
        cos, sin = angles(group * self.kind.ratio, self.frequencies)
        layout, sources = self.layout, list(state.pools.sources)
        slots = slots_of(tables.global_pages, tokens.seat, group, layout.groups[self.kind.pool].rows_per_page)
        slots = jnp.where(self.compressor.completes(tokens), slots, -1)
        pool = sources[self.kind.pool]
        sources[self.kind.pool] = pool._replace(
            kv=write_rows(pool.kv, numbers.source, slots, *pack_kv(rotate(latent, cos, sin), layout.kv_row)),
            key=write_rows(
                pool.key, numbers.source, slots, *pack_key(self.indexer.keys(latent, cos, sin), layout.key_row)
            ),
        )
        return CacheState(state.pools._replace(sources=tuple(sources)), pairs), carry

    def _attend_tiles(
        self,
        x: jax.Array,
        projected: Projected,
        tokens: Tokens,
        pools: Pools,
        tables: Tables,
        numbers: LayerNumbers,
        chosen: Selection,
    ) -> tuple[jax.Array, Selection]:
        """Selection and attention, a few queries at a time: what they gather is larger than what they are given."""
        inputs = (x, projected, tokens)
        queries = FEW_QUERIES if x.shape[0] <= QUERY_TILE else QUERY_TILE

        def one_tile(start: jax.Array, carry: tuple) -> tuple:
            heads, chosen = carry
            x, projected, tokens = take(inputs, start, queries)
            picked = take(chosen, start, queries)
            if self.indexer is not None:
                picked = self._select(x, projected.qr, tokens, pools, tables, numbers, picked)
            result = self._attend(projected.q, tokens, pools, tables, numbers, picked)
            return put(heads, result, start), put(chosen, picked, start)

        heads = jnp.zeros(projected.q.shape, BF16)
        return over_tiles(jnp.sum(tokens.valid), queries, one_tile, (heads, chosen))

    def _select(
        self,
        x: jax.Array,
        qr: jax.Array,
        tokens: Tokens,
        pools: Pools,
        tables: Tables,
        numbers: LayerNumbers,
        chosen: Selection,
    ) -> Selection:
        assert self.indexer is not None
        kind = self.kind
        cos, sin = angles(tokens.position, self.frequencies)
        visible = jnp.where(tokens.valid, (tokens.position + 1) // kind.ratio, 0)
        query = self.indexer.query(x, qr, cos, sin, visible)
        rows_per_page = self.layout.groups[kind.pool].rows_per_page
        keys = KeyPages(
            pools.sources[kind.pool].key, numbers.source, tables.global_pages, tokens.seat, rows_per_page, self.layout
        )
        if kind.candidates == "use":
            return Selection(select_from_blocks(query, keys, self.config, chosen.blocks), chosen.blocks)
        selected = select_from_all(query, keys, self.config, kind.candidates == "make")
        return selected if kind.candidates == "make" else Selection(selected.picks, chosen.blocks)

    def _attend(
        self, q: jax.Array, tokens: Tokens, pools: Pools, tables: Tables, numbers: LayerNumbers, chosen: Selection
    ) -> jax.Array:
        """`q [t, H, C]` over the window and the chosen compressed rows -> `[t, H, C]`."""
        layout, kind = self.layout, self.kind
        slots, present = window_bank(tokens, tables, layout)
        bank = unpack_window(read_rows(pools.window, numbers.layer, slots, layout.window_row), layout.window_row)
        if kind.ratio:
            picks = chosen.picks
            rows_per_page = layout.groups[kind.pool].rows_per_page
            slots = slots_of(tables.global_pages, tokens.seat, jnp.maximum(picks, 0), rows_per_page)
            packed = read_rows(pools.sources[kind.pool].kv, numbers.source, slots, layout.kv_row)
            bank = jnp.concatenate([bank, unpack_kv(packed, layout.kv_row)], 1)
            present = jnp.concatenate([present, picks >= 0], 1)
        return attend(q, bank, present, self.attn_sink[...])
