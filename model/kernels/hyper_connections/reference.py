"""mHC: the residual stream as M parallel copies (spec section 3). Everything here is float32 until one cast back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import F32, bf16, dot_f32


class Mixes(NamedTuple):
    """`pre [t, M]` narrows the next sublayer's stream, `post [t, M]`, `comb [t, from, to]` widen this one's result."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def sinkhorn(logits: jax.Array, num_rounds: int, eps: float) -> jax.Array:
    """`[t, from, to]` -> nearly doubly stochastic: softmax over `to`, then columns, then rounds of rows and columns."""
    comb = jax.nn.softmax(logits, -1) + eps
    comb = comb / (jnp.sum(comb, -2, keepdims=True) + eps)

    def one_round(_: int, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, -1, keepdims=True) + eps)
        return comb / (jnp.sum(comb, -2, keepdims=True) + eps)

    return lax.fori_loop(0, num_rounds - 1, one_round, comb)


def split_mixes(z: jax.Array, scale: jax.Array, base: jax.Array, num_rounds: int, eps: float) -> Mixes:
    """`z [t, (2+M)*M]`, `scale [3]`, `base [(2+M)*M]` -> coefficients."""
    copies = round((1 + z.shape[-1]) ** 0.5) - 1
    pre, post, comb = jnp.split(z, (copies, 2 * copies), -1)
    base_pre, base_post, base_comb = jnp.split(base, (copies, 2 * copies))
    logits = (comb * scale[2] + base_comb).reshape(-1, copies, copies)
    return Mixes(
        jax.nn.sigmoid(pre * scale[0] + base_pre) + eps,
        2 * jax.nn.sigmoid(post * scale[1] + base_post),
        sinkhorn(logits, num_rounds, eps),
    )


def mixing_logits(stream: jax.Array, fn: jax.Array, norm_eps: float) -> jax.Array:
    """`stream [t, M, D]`, `fn [(2+M)*M, M*D]` -> z: a linear of the flat stream, over the rms of the whole of it."""
    flat = stream.reshape(stream.shape[0], -1).astype(F32)
    mean = jnp.mean(jnp.square(flat), -1, keepdims=True)
    return dot_f32(flat, fn) * lax.rsqrt(mean + norm_eps)


def narrow(stream: jax.Array, pre: jax.Array) -> jax.Array:
    """`[t, M, D]`, `[t, M]` -> bfloat16 `[t, D]`: the copies summed with the handed-over weights, in copy order."""
    total = pre[:, 0, None] * stream[:, 0].astype(F32)
    for copy in range(1, stream.shape[1]):
        total = total + pre[:, copy, None] * stream[:, copy].astype(F32)
    return bf16(total)


def widen(y: jax.Array, stream: jax.Array, mixes: Mixes) -> jax.Array:
    """Sublayer result `y [t, D]` back onto the stream `[t, M, D]`: post[j]*y + sum_i comb[i, j]*x[i], one rounding."""
    total = mixes.comb[:, 0, :, None] * stream[:, 0, None].astype(F32)
    for copy in range(1, stream.shape[1]):
        total = total + mixes.comb[:, copy, :, None] * stream[:, copy, None].astype(F32)
    return bf16(mixes.post[..., None] * y.astype(F32)[:, None] + total)
