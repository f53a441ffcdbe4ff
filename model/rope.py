"""Rotary positions (spec section 4): frequencies made on the host, angles as float32 products on the device."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rorqual.model.config import ModelConfig, YarnConfig
from rorqual.model.numerics import F32, bf16


def _yarn_ramp(yarn: YarnConfig, base: float, rotated: int) -> np.ndarray:
    """Share of the interpolated frequency per pair: 0 keeps it, 1 divides it by the factor."""

    def dimension(turns: float) -> float:
        return rotated * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), rotated - 1)
    pairs = np.arange(rotated // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 0.001)), np.float32(0), np.float32(1))


def inverse_frequencies(base: float, rotated: int, yarn: YarnConfig | None) -> np.ndarray:
    """float32 `[rotated / 2]`. The power in float64, rounded, then a float32 division: other orders miss by an ulp,
    which is 0.03 rad at one million positions. `yarn` None or with original_length 0: plain frequencies."""
    power = (np.float64(base) ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)).astype(np.float32)
    frequencies = np.float32(1.0) / power
    if yarn is None or not yarn.original_length:
        return frequencies
    ramp = _yarn_ramp(yarn, base, rotated)
    return frequencies / np.float32(yarn.factor) * ramp + frequencies * (np.float32(1) - ramp)


def layer_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """Frequencies of a layer that reads compressed KV (its whole attention uses them), or of a window-only layer."""
    if compressed:
        return inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
    return inverse_frequencies(config.rope_theta, config.rope_head_dim, None)


def angles(position: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """int32 positions `[t]` -> (cos, sin) float32 `[t, R/2]` of the float32 product position * f."""
    angle = position.astype(F32)[:, None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the last R features of bfloat16 `[t, ..., n]`, adjacent pairs as complex numbers. Inverse: pass -sin."""
    rotated = 2 * cos.shape[-1]
    kept, turned = x[..., : x.shape[-1] - rotated], x[..., x.shape[-1] - rotated :].astype(F32)
    lead = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.reshape(lead), sin.reshape(lead)
    pairs = turned.reshape(*turned.shape[:-1], rotated // 2, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    result = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return jnp.concatenate([kept, bf16(result.reshape(turned.shape))], -1)
