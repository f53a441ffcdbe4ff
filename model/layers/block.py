"""One transformer block: mHC around attention and around the experts (spec section 3), cut into row tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rorqual.cache.layout import CacheLayout
from rorqual.model.config import ModelConfig
from rorqual.model.kernels.hyper_connections.reference import Mixes, mixing_logits, narrow, split_mixes, widen
from rorqual.model.layers.attention import Attention
from rorqual.model.layers.compressor import Carry
from rorqual.model.layers.context import CacheState, Tables, Tokens
from rorqual.model.layers.experts import Experts, expert_tile_rows
from rorqual.model.layers.indexer import Selection
from rorqual.model.layers.kinds import LayerKind, LayerNumbers
from rorqual.model.layers.linear import RMSNorm, Weights
from rorqual.model.layers.tiles import over_tiles, put, take
from rorqual.model.numerics import BF16, F32
from rorqual.model.quantise import fp8_roundtrip


class Hidden(NamedTuple):
    """The residual stream `[T, M, D]` bfloat16 and the pre-mix `[T, M]` float32 that narrows it next."""

    stream: jax.Array
    pre: jax.Array


class Routed(NamedTuple):
    """Between the two halves of the expert sublayer, per token: quantised input, experts, weights, mixes."""

    x: jax.Array
    experts: jax.Array
    weights: jax.Array
    mixes: Mixes


class HyperConnection(nnx.Module):
    """The mixing weights of one sublayer."""

    def __init__(self, fn: jax.Array, base: jax.Array, scale: jax.Array, config: ModelConfig):
        self.fn, self.base, self.scale = nnx.Param(fn), nnx.Param(base), nnx.Param(scale)
        self.config = config

    def __call__(self, stream: jax.Array) -> Mixes:
        """`[t, M, D]` -> coefficients of this sublayer (its `pre` is for the next one)."""
        config = self.config
        z = mixing_logits(stream, self.fn[...], config.norm_eps)
        return split_mixes(z, self.scale[...], self.base[...], config.hc_sinkhorn_iters, config.hc_eps)


class Block(nnx.Module):
    """One layer of the backbone."""

    def __init__(self, weights: Weights, config: ModelConfig, layout: CacheLayout, kind: LayerKind):
        self.attn = Attention(weights["attn"], config, layout, kind)
        self.ffn = Experts(weights["ffn"], config)
        self.attn_norm = RMSNorm(weights["attn_norm"], config.norm_eps)
        self.ffn_norm = RMSNorm(weights["ffn_norm"], config.norm_eps)
        self.hc_attn = HyperConnection(**weights["hc_attn"], config=config)
        self.hc_ffn = HyperConnection(**weights["hc_ffn"], config=config)
        self.config = config

    def __call__(
        self,
        hidden: Hidden,
        chosen: Selection,
        state: CacheState,
        tokens: Tokens,
        tables: Tables,
        numbers: LayerNumbers,
        tile: "TileSizes",
    ) -> tuple[Hidden, Selection, CacheState]:
        """All tokens of the step through the block; `num_valid` of them are real and come first."""
        num_valid = jnp.sum(tokens.valid)
        total = tokens.token.shape[0]
        routed = self._nothing_routed(total)
        carry = self.attn.compressor.empty_carry() if self.attn.compressor is not None else None

        def first_half(start: jax.Array, carry: tuple) -> tuple:
            hidden, chosen, routed, state, pair = carry
            rows, last, fed = take((hidden, chosen, tokens), start, tile.rows)
            mid, picked, state, pair, route = self._until_experts(rows, last, fed, state, tables, numbers, pair)
            return put(hidden, mid, start), put(chosen, picked, start), put(routed, route, start), state, pair

        hidden, chosen, routed, state, _ = over_tiles(
            num_valid, tile.rows, first_half, (hidden, chosen, routed, state, carry)
        )
        experts = jnp.where(tokens.valid[:, None], routed.experts, self.num_experts)
        by_slot = self.ffn.experts(routed.x, experts, routed.weights, numbers.stack, self._expert_tile(total, tile))

        def second_half(start: jax.Array, hidden: Hidden) -> Hidden:
            stream, route, slots = take((hidden.stream, routed, by_slot), start, tile.rows)
            y = self.ffn.combine(route.x, slots)
            return put(hidden, Hidden(widen(y, stream, route.mixes), route.mixes.pre), start)

        return over_tiles(num_valid, tile.rows, second_half, hidden), chosen, state

    @property
    def num_experts(self) -> int:
        return self.ffn.gate.bias[...].shape[0]

    def _expert_tile(self, total: int, tile: "TileSizes") -> int:
        return tile.expert_rows or expert_tile_rows(total * self.config.n_activated_experts, self.num_experts)

    def _until_experts(
        self,
        hidden: Hidden,
        chosen: Selection,
        tokens: Tokens,
        state: CacheState,
        tables: Tables,
        numbers: LayerNumbers,
        carry: Carry | None,
    ) -> tuple[Hidden, Selection, CacheState, Carry | None, Routed]:
        """A tile through attention, widening, and the router."""
        mixes = self.hc_attn(hidden.stream)
        x = self.attn_norm(narrow(hidden.stream, hidden.pre))
        y, state, chosen, carry = self.attn(x, tokens, state, tables, numbers, chosen, carry)
        stream = widen(y, hidden.stream, mixes)
        routed = self.route(stream, mixes.pre, tokens.image)
        return Hidden(stream, mixes.pre), chosen, state, carry, routed

    def route(self, stream: jax.Array, pre: jax.Array, image: jax.Array) -> Routed:
        """Stream between the halves `[t, M, D]` -> what the expert half needs."""
        x = self.ffn_norm(narrow(stream, pre))
        experts, weights = self.ffn.gate(x, image)
        return Routed(fp8_roundtrip(x), experts, weights, self.hc_ffn(stream))

    def _nothing_routed(self, total: int) -> Routed:
        config = self.config
        slots, copies = config.n_activated_experts, config.hc_mult
        return Routed(
            jnp.zeros((total, config.dim), BF16),
            jnp.zeros((total, slots), jnp.int32),
            jnp.zeros((total, slots), F32),
            Mixes(
                jnp.zeros((total, copies), F32),
                jnp.zeros((total, copies), F32),
                jnp.zeros((total, copies, copies), F32),
            ),
        )


class TileSizes(NamedTuple):
    """Rows of a token tile (None: the whole step is one) and of an expert tile (0: chosen by the number of tokens)."""

    rows: int | None
    expert_rows: int
