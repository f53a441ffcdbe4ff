"""The model's activation formats: FP8 per 32, FP4 per 32 (E8M0 scales) and FP4 per 16 (E4M3 scales). Spec section 2.

Each `*_groups` function returns the grid values and the scales apart; their product is exactly a bf16 number.
`*_codes` turn grid values into the stored codes and `*_values` turn codes back. All arithmetic is on normal float32
numbers, since CPUs flush subnormals here.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import BF16, F32, ceil_log2, exponent_of, power_of_two

FP8_GROUP = 32
KEY_GROUP = 32
KV_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Neighbours of the e2m1 grid, and whether the midpoint belongs to the upper one (the even code).
E2M1_STEPS = (
    (0.0, 0.5, False),
    (0.5, 1.0, True),
    (1.0, 1.5, False),
    (1.5, 2.0, True),
    (2.0, 3.0, False),
    (3.0, 4.0, True),
    (4.0, 6.0, False),
)
INT32_MIN = -(2**31)


def _with_sign_of(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    """|magnitude| with the sign bit of x, zeros included (the stored codes keep the sign of a zero)."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(INT32_MIN)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.int32) | bits, F32)


def _round_to_grid(x: jax.Array, mantissa_bits: int, min_exponent: int) -> jax.Array:
    """Nearest-even to a float grid with `mantissa_bits` and subnormals below 2^min_exponent; signs of zeros kept."""
    magnitude = jnp.abs(x)
    step = jnp.maximum(exponent_of(magnitude), min_exponent) - mantissa_bits
    rounded = jnp.round(magnitude * power_of_two(-step)) * power_of_two(step)
    return _with_sign_of(rounded, x)


def round_e4m3(x: jax.Array) -> jax.Array:
    """float32 within +-448 -> the nearest e4m3 number, as float32."""
    return _round_to_grid(x, 3, -6)


def round_e2m1(x: jax.Array) -> jax.Array:
    """float32 within +-6 -> the nearest e2m1 number (ties to the even code), as float32."""
    return _round_to_grid(x, 1, 0)


def _grouped(x: jax.Array, group: int) -> jax.Array:
    return x.astype(F32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def fp8_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[..., n]` -> (e4m3 values `[..., n/32, 32]` float32, scale exponents `[..., n/32]` int32)."""
    grouped = _grouped(x, FP8_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), -1), 1e-4)
    exponent = ceil_log2(amax / E4M3_MAX)
    scaled = grouped * power_of_two(-exponent)[..., None]
    return round_e4m3(jnp.clip(scaled, -E4M3_MAX, E4M3_MAX)), exponent


def fp4_key_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index keys and queries: `[..., n]` -> (e2m1 values `[..., n/32, 32]`, scale exponents `[..., n/32]` int32)."""
    grouped = _grouped(x, KEY_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), -1), E2M1_MAX * 2.0**-126)
    exponent = ceil_log2(amax / E2M1_MAX)
    scaled = grouped * power_of_two(-exponent)[..., None]
    return round_e2m1(jnp.clip(scaled, -E2M1_MAX, E2M1_MAX)), exponent


def fp4_kv_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compressed KV: `[..., n]` -> (e2m1 values `[..., n/16, 16]`, e4m3 scales `[..., n/16]`, both float32)."""
    grouped = _grouped(x, KV_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), -1), E2M1_MAX * 2.0**-9)
    scale = round_e4m3(jnp.minimum(amax / E2M1_MAX, E4M3_MAX))
    return _nearest_e2m1_multiple(grouped, scale[..., None]), scale


def _nearest_e2m1_multiple(x: jax.Array, scale: jax.Array) -> jax.Array:
    """round_e2m1(x / scale), clamped, without the division: XLA divides by reciprocals, which turns exact ties over.

    A bf16 number is compared with the midpoints times an e4m3 scale, and those products are exact.
    """
    magnitude = jnp.abs(x)
    value = jnp.zeros_like(magnitude)
    for lower, upper, tie_goes_up in E2M1_STEPS:
        midpoint = scale * ((lower + upper) / 2)
        passed = magnitude >= midpoint if tie_goes_up else magnitude > midpoint
        value = jnp.where(passed, upper, value)
    return _with_sign_of(value, x)


def _join(values: jax.Array, scale: jax.Array) -> jax.Array:
    joined = values * scale[..., None]
    return joined.reshape(*joined.shape[:-2], joined.shape[-2] * joined.shape[-1]).astype(BF16)


def fp8_roundtrip(x: jax.Array) -> jax.Array:
    """What an FP8 linear sees of its input: `[..., n]` -> bfloat16 `[..., n]`, exact. A last short group is padded."""
    short = -x.shape[-1] % FP8_GROUP
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x
    values, exponent = fp8_groups(padded)
    return _join(values, power_of_two(exponent))[..., : x.shape[-1]]


def fp4_key_roundtrip(x: jax.Array) -> jax.Array:
    """`[..., n]` -> bfloat16 `[..., n]` as index queries enter the scores."""
    values, exponent = fp4_key_groups(x)
    return _join(values, power_of_two(exponent))


def fp4_kv_roundtrip(x: jax.Array) -> jax.Array:
    """`[..., n]` -> bfloat16 `[..., n]` as compressed KV is stored."""
    return _join(*fp4_kv_groups(x))


def _code(values: jax.Array, mantissa_bits: int, min_exponent: int, sign_bit: int) -> jax.Array:
    """uint32 codes of grid values: exponent and mantissa bits of a small float with the given subnormal threshold."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = jnp.abs(values)
    bias_shift = (127 + min_exponent - 1) << mantissa_bits
    normal = ((bits & 0x7FFFFFFF) >> (23 - mantissa_bits)) - jnp.uint32(bias_shift)
    subnormal = (magnitude * 2.0 ** (mantissa_bits - min_exponent)).astype(jnp.uint32)
    code = jnp.where(magnitude < 2.0**min_exponent, subnormal, normal)
    return code | ((bits >> 31) << sign_bit)


def _value(codes: jax.Array, mantissa_bits: int, min_exponent: int, sign_bit: int) -> jax.Array:
    codes = codes.astype(jnp.uint32)
    magnitude = codes & jnp.uint32((1 << sign_bit) - 1)
    bias_shift = (127 + min_exponent - 1) << mantissa_bits
    normal = lax.bitcast_convert_type((magnitude + jnp.uint32(bias_shift)) << (23 - mantissa_bits), F32)
    subnormal = magnitude.astype(F32) * 2.0 ** (min_exponent - mantissa_bits)
    value = jnp.where(magnitude < (1 << mantissa_bits), subnormal, normal)
    return jnp.where((codes >> sign_bit) & 1, -value, value)


def e4m3_codes(values: jax.Array) -> jax.Array:
    """e4m3 numbers in float32 -> uint32 codes below 256."""
    return _code(values, 3, -6, 7)


def e4m3_values(codes: jax.Array) -> jax.Array:
    """Codes below 256 -> float32 (codes are never NaN: the engine writes none and the loader refuses them)."""
    return _value(codes, 3, -6, 7)


def e2m1_codes(values: jax.Array) -> jax.Array:
    """e2m1 numbers in float32 -> uint32 codes below 16."""
    return _code(values, 1, 0, 3)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """Codes below 16 -> float32."""
    return _value(codes, 1, 0, 3)


def e8m0_codes(exponent: jax.Array) -> jax.Array:
    """int32 exponents -> uint32 codes (biased by 127)."""
    return (exponent + 127).astype(jnp.uint32)


def e8m0_values(codes: jax.Array) -> jax.Array:
    """Codes 1..254 -> float32 powers of two."""
    return power_of_two(codes.astype(jnp.int32) - 127)
