"""Engram: n-gram memory added to the stream before a layer (spec section 8), hashed on the device with 32-bit words."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from rorqual.model.config import ModelConfig
from rorqual.model.layers.linear import Fp8Linear, Weights
from rorqual.model.numerics import BF16, F32, bf16, power_of_two
from rorqual.model.quantise import e4m3_values, fp8_roundtrip

U32 = jnp.uint32
DEAD = -1  # in a list of compressed ids: an image token, or before the start of the sequence


class HashConstants(NamedTuple):
    """Constants of one layer's hash, hashable: odd multipliers as (low, high) words by lookback, primes and row
    offsets by column."""

    multipliers: tuple[tuple[int, int], ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]


def _multiply_64(ids: jax.Array, low: int, high: int) -> tuple[jax.Array, jax.Array]:
    """uint32 ids times a 64-bit constant, modulo 2^64, as (low, high) words from products of 16-bit halves."""
    a_low, a_high = ids & 0xFFFF, ids >> 16
    b_low, b_high = U32(low & 0xFFFF), U32(low >> 16)
    corner, cross, cross_too = a_low * b_low, a_high * b_low, a_low * b_high
    middle = (corner >> 16) + (cross & 0xFFFF) + (cross_too & 0xFFFF)
    upper = a_high * b_high + (cross >> 16) + (cross_too >> 16) + (middle >> 16)
    return ids * U32(low), upper + ids * U32(high)


def _modulo(low: jax.Array, high: jax.Array, primes: tuple[int, ...]) -> jax.Array:
    """(high:low) modulo each of n primes: `[...]` -> uint32 `[..., n]`, a few bits at a time so nothing overflows."""
    room = 32 - max(primes).bit_length()
    step = 1 << (room.bit_length() - 1)  # a power of two divides the word evenly
    divisors = np.array(primes, np.uint32)
    rest = jnp.zeros((*low.shape, len(primes)), U32)
    for word in (high, low):
        for shift in range(32 - step, -1, -step):
            digit = (word >> U32(shift)) & U32((1 << step) - 1)
            rest = ((rest << U32(step)) | digit[..., None]) % divisors
    return rest


def lookback_ids(ids: jax.Array, follows: jax.Array, history: jax.Array) -> jax.Array:
    """Compressed ids of each token and its predecessors in its row.

    `ids [T]` (DEAD for image tokens), `follows [T]` (the entry before is the same row's previous token),
    `history [T, n]` the last n ids before the row's first token of this step (newest first) -> int32 `[T, n + 1]`,
    newest first.
    """
    depth = history.shape[1]
    place = jnp.arange(ids.shape[0])
    # Number of this row's tokens of this step before each token.
    first = lax.cummax(jnp.where(follows, 0, place))
    within = place - first
    columns = [ids]
    for back in range(1, depth + 1):
        in_step = jnp.roll(ids, back)
        from_history = jnp.take_along_axis(history, jnp.clip(back - within - 1, 0, depth - 1)[:, None], 1)[:, 0]
        columns.append(jnp.where(within >= back, in_step, from_history))
    return jnp.stack(columns, 1)


def ngram_rows(ids: jax.Array, pad: jax.Array, constants: HashConstants, n_heads: int) -> jax.Array:
    """`ids [T, n]` newest first (DEAD stops the lookback), `pad` the compressed pad id -> table rows `[T, columns]`."""
    alive = jnp.cumprod(ids >= 0, 1).astype(bool)
    words = jnp.where(alive, ids, pad).astype(U32)
    low = high = jnp.zeros(ids.shape[0], U32)
    columns = []
    for back in range(ids.shape[1]):
        product = _multiply_64(words[:, back], *constants.multipliers[back])
        low, high = low ^ product[0], high ^ product[1]
        if back:
            part = slice((back - 1) * n_heads, back * n_heads)
            rest = _modulo(low, high, constants.primes[part]).astype(jnp.int32)
            columns.append(rest + np.array(constants.offsets[part], np.int32))
    return jnp.concatenate(columns, 1)


class EngramTable(nnx.Module):
    """Table rows as stored: e4m3 codes `[rows, width]` and E8M0 scales `[rows, width / 32]`."""

    def __init__(self, weights: Weights):
        self.weight = nnx.Param(weights["weight"])
        self.scale = nnx.Param(weights["scale"])

    def __call__(self, rows: jax.Array) -> jax.Array:
        """int32 `[t, columns]` -> bfloat16 `[t, columns * width]`, side by side."""
        codes = jnp.take(self.weight[...], rows, 0)
        factors = power_of_two(jnp.take(self.scale[...], rows, 0).astype(jnp.int32) - 127)
        grouped = e4m3_values(codes).reshape(*factors.shape, -1) * factors[..., None]
        return grouped.reshape(rows.shape[0], -1).astype(BF16)


class Engram(nnx.Module):
    """Gated addition of n-gram memory to every copy of the stream."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.embed = EngramTable(weights["embed"])
        self.wkv = Fp8Linear(weights["wkv"])
        self.q_weight = nnx.Param(weights["q_weight"])
        self.k_weight = nnx.Param(weights["k_weight"])
        self.config = config

    def gate(self, stream: jax.Array, keys: jax.Array) -> jax.Array:
        """`stream`, `keys [t, M, D]` -> float32 `[t, M]`."""
        x, key = stream.astype(F32), keys.astype(F32)

        def rstd(value: jax.Array) -> jax.Array:
            return lax.rsqrt(jnp.mean(jnp.square(value), -1) + self.config.norm_eps)

        weight = self.q_weight[...].astype(F32) * self.k_weight[...].astype(F32)
        product = jnp.sum(x * weight * key, -1) * rstd(x) * rstd(key) * self.config.dim**-0.5
        return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(product), 1e-6)), product))

    def __call__(self, stream: jax.Array, rows: jax.Array, text: jax.Array) -> jax.Array:
        """`stream [t, M, D]`, memory `[t, columns * width]`, `text [t]` (False: image, unchanged) -> new stream."""
        kv = self.wkv(fp8_roundtrip(rows)).reshape(stream.shape[0], self.config.hc_mult + 1, self.config.dim)
        gate = jnp.where(text[:, None], self.gate(stream, kv[:, :-1]), 0)
        return bf16(stream.astype(F32) + gate[..., None] * kv[:, -1:].astype(F32))
