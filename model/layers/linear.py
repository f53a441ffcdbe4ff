"""Linear layers and norms: the leaves of every other module. Weights are `[out, in]`, named as in the checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rorqual.model.numerics import BF16, F32, bf16, dot, power_of_two
from rorqual.model.quantise import e2m1_values, e4m3_values

Weights = dict[str, Any]
TILE = 32


def unpack_fp8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """uint8 e4m3 codes `[out, in]` with E8M0 scales per 32x32 tile -> bfloat16, exact."""
    out, width = codes.shape
    factors = power_of_two(scale.astype(jnp.int32) - 127)
    factors = jnp.repeat(jnp.repeat(factors, TILE, 0)[:out], TILE, 1)[:, :width]
    return (e4m3_values(codes) * factors).astype(BF16)


def unpack_fp4(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """uint8 pairs of e2m1 codes `[out, in/2]` (even one low), E8M0 scales `[out, in/32]` -> bfloat16 `[out, in]`."""
    both = jnp.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    factors = jnp.repeat(power_of_two(scale.astype(jnp.int32) - 127), TILE, 1)
    return (e2m1_values(both) * factors).astype(BF16)


class Linear(nnx.Module):
    """bf16 x bf16 product, summed in float32."""

    def __init__(self, weights: Weights):
        self.weight = nnx.Param(weights["weight"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]` -> bfloat16 `[..., out]`."""
        return bf16(self.wide(x))

    def wide(self, x: jax.Array) -> jax.Array:
        """`[..., in]` -> float32 `[..., out]`, not rounded."""
        return dot(x, self.weight[...])


class Fp8Linear(nnx.Module):
    """FP8 weight; packed (codes and scale tiles) or already dequantised, which the presence of `scale` tells."""

    def __init__(self, weights: Weights):
        self.weight = nnx.Param(weights["weight"])
        self.scale = nnx.Param(weights["scale"]) if "scale" in weights else None

    def dense(self) -> jax.Array:
        weight = self.weight[...]
        return weight if self.scale is None else unpack_fp8(weight, self.scale[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]`, already through `fp8_roundtrip` (several linears share one input) -> bfloat16 `[..., out]`."""
        return bf16(dot(x, self.dense()))


class RMSNorm(nnx.Module):
    """Statistics, scaling and weight in float32, one rounding at the end (spec, notation)."""

    def __init__(self, weights: Weights, eps: float):
        self.weight = nnx.Param(weights["weight"])
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """bfloat16 or float32 `[..., n]` -> bfloat16 `[..., n]`."""
        x = x.astype(F32)
        mean = jnp.mean(jnp.square(x), -1, keepdims=True)
        return bf16(x * lax.rsqrt(mean + self.eps) * self.weight[...].astype(F32))
