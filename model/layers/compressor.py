"""Compressed KV and index keys, made by the KV sources and shared by the layers after them (spec sections 5 and 6)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rorqual.model.config import ModelConfig
from rorqual.model.layers.context import Tokens
from rorqual.model.layers.linear import Linear, RMSNorm, Weights
from rorqual.model.numerics import bf16


class Carry(NamedTuple):
    """kv and score float32 `[C]` of the token before a tile: its partner may be the tile's first token."""

    kv: jax.Array
    score: jax.Array


def merge_pair(kv: jax.Array, score: jax.Array, earlier_kv: jax.Array, earlier_score: jax.Array) -> jax.Array:
    """Softmax over the pair per channel, weighted sum: float32 `[t, C]` each -> bfloat16 `[t, C]`."""
    top = jnp.maximum(score, earlier_score)
    late, early = jnp.exp(score - top), jnp.exp(earlier_score - top)
    return bf16((early * earlier_kv + late * kv) / (early + late))


class Compressor(nnx.Module):
    """Ratio 1: one latent per token. Ratio 2: one per complete pair (2j, 2j+1), made when the second token comes."""

    def __init__(self, weights: Weights, config: ModelConfig, ratio: int):
        self.wkv = Linear(weights["wkv"])
        self.wgate = Linear(weights["wgate"]) if ratio == 2 else None
        self.norm = RMSNorm(weights["norm"], config.norm_eps)
        self.ratio = ratio

    def empty_carry(self) -> Carry:
        zero = jnp.zeros(self.norm.weight[...].shape, jnp.float32)
        return Carry(zero, zero)

    def latents(
        self, x: jax.Array, tokens: Tokens, pairs: jax.Array, source: jax.Array, carry: Carry
    ) -> tuple[jax.Array, jax.Array, Carry]:
        """Latents before RoPE `[t, C]` (meaningful where a group completes), new `pairs`, carry for the next tile."""
        if self.wgate is None:
            return self.norm(self.wkv(x)), pairs, carry
        kv, score = self.wkv.wide(x), self.wgate.wide(x)
        waiting = pairs[source, tokens.seat]
        follows = tokens.follows[:, None]
        earlier_kv = jnp.where(follows, jnp.concatenate([carry.kv[None], kv[:-1]]), waiting[:, 0])
        earlier_score = jnp.where(follows, jnp.concatenate([carry.score[None], score[:-1]]), waiting[:, 1])
        latent = self.norm(merge_pair(kv, score, earlier_kv, earlier_score))
        half_filled = tokens.valid & tokens.ends & (tokens.position % 2 == 0)
        seat = jnp.where(half_filled, tokens.seat, pairs.shape[1])
        pairs = pairs.at[source, seat].set(jnp.stack([kv, score], 1), mode="drop")
        return latent, lax.optimization_barrier(pairs), Carry(kv[-1], score[-1])

    def completes(self, tokens: Tokens) -> jax.Array:
        """bool `[t]`: the token is the last of its group."""
        return tokens.valid & ((tokens.position + 1) % self.ratio == 0)

    def group(self, tokens: Tokens) -> jax.Array:
        """int32 `[t]`: number of the token's group in the sequence."""
        return tokens.position // self.ratio
