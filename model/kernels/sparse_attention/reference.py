"""Attention of one query token over a bank of latents that are key and value at once, with a sink (spec section 4)."""

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import F32, bf16


def attend(q: jax.Array, bank: jax.Array, present: jax.Array, sink: jax.Array) -> jax.Array:
    """`q [t, H, C]`, `bank [t, n, C]`, `present [t, n]` (False: the row takes no part), `sink [H]` float32
    -> bfloat16 `[t, H, C]`, zeros where nothing is present.

    Logits and sums are float32; unnormalised probabilities are rounded to bf16 before they meet the values, not in
    the denominator, which the sink joins.
    """
    logits = lax.dot_general(q, bank, (((2,), (2,)), ((0,), (0,))), preferred_element_type=F32)
    logits = jnp.where(present[:, None], logits * q.shape[-1] ** -0.5, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, -1), sink)
    weights = jnp.exp(logits - top[..., None])
    total = jnp.sum(weights, -1) + jnp.exp(sink - top)
    # A masked row may hold anything (a foreign page): zero times that must stay zero.
    values = jnp.where(present[..., None], bank, 0)
    summed = lax.dot_general(bf16(weights), values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=F32)
    return bf16(summed / total[..., None])
