"""The roundings and products every layer is made of.

The model names its roundings to bf16, and they have to happen: inside jit, XLA keeps excess precision and drops a
cast to bf16 and back. `lax.reduce_precision` is an operation of its own, which no simplification removes.
"""

import jax
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32
BF16 = jnp.bfloat16


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 -> float32 holding bf16 numbers (nearest even)."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def bf16(x: jax.Array) -> jax.Array:
    """float32 -> bfloat16, a rounding that survives jit."""
    return round_bf16(x).astype(BF16)


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [..., in]` times `weight [out, in]` -> float32 `[..., out]`, summed in float32.

    Both operands hold bf16 numbers (every stored format of the model is exact in bf16), so products are exact in
    float32 and only the order of summation is free. A weight stored as float32 is used as it is; a bf16 weight meets
    bf16 activations, which is the form accelerators have units for.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(weight.dtype), weight, contract, preferred_element_type=F32)


def dot_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `dot`, for weights that are true float32 numbers: no pass through a shorter format on any backend."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(F32), weight, contract, precision=lax.Precision.HIGHEST)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """int32 exponent in [-126, 127] -> the exact float32 power of two."""
    return lax.bitcast_convert_type((exponent + 127) << 23, F32)


def exponent_of(x: jax.Array) -> jax.Array:
    """Unbiased exponent of |x| for float32 normals (-127 for zero and subnormals)."""
    return ((lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127


def ceil_log2(x: jax.Array) -> jax.Array:
    """Smallest e with 2^e >= x, from the bits of a positive float32 normal (a float logarithm misses by one)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
