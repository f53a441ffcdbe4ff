"""Cache rows: quantise a latent to its stored form, pack it into words, and back (spec section 2; rows: cache/layout).

`pack_*` take bfloat16 rows `[n, width]` after RoPE and give (data words, scale words); `unpack_*` give the bfloat16
numbers the model computes with, exactly.
"""

import jax
import jax.numpy as jnp

from rorqual.cache.layout import RowLayout
from rorqual.cache.pools import pack_words, unpack_words
from rorqual.model import quantise
from rorqual.model.numerics import BF16

Packed = tuple[jax.Array, jax.Array]


def _pack(codes: jax.Array, scales: jax.Array, row: RowLayout) -> Packed:
    flat = codes.reshape(*codes.shape[:-2], row.num_values)
    return pack_words(flat, row.bits, row.data_words), pack_words(scales, 8, row.scale_words)


def _unpack(packed: Packed, row: RowLayout) -> Packed:
    data, scale = packed
    return unpack_words(data, row.bits, row.num_values), unpack_words(scale, 8, row.num_scales)


def _apply(values: jax.Array, factors: jax.Array, row: RowLayout) -> jax.Array:
    grouped = values.reshape(*values.shape[:-1], row.num_scales, row.group) * factors[..., None]
    return grouped.reshape(values.shape).astype(BF16)


def pack_window(x: jax.Array, row: RowLayout) -> Packed:
    values, exponent = quantise.fp8_groups(x)
    return _pack(quantise.e4m3_codes(values), quantise.e8m0_codes(exponent), row)


def unpack_window(packed: Packed, row: RowLayout) -> jax.Array:
    codes, scales = _unpack(packed, row)
    return _apply(quantise.e4m3_values(codes), quantise.e8m0_values(scales), row)


def pack_kv(x: jax.Array, row: RowLayout) -> Packed:
    values, scale = quantise.fp4_kv_groups(x)
    return _pack(quantise.e2m1_codes(values), quantise.e4m3_codes(scale), row)


def unpack_kv(packed: Packed, row: RowLayout) -> jax.Array:
    codes, scales = _unpack(packed, row)
    return _apply(quantise.e2m1_values(codes), quantise.e4m3_values(scales), row)


def pack_key(x: jax.Array, row: RowLayout) -> Packed:
    values, exponent = quantise.fp4_key_groups(x)
    return _pack(quantise.e2m1_codes(values), quantise.e8m0_codes(exponent), row)


def unpack_key(packed: Packed, row: RowLayout) -> jax.Array:
    codes, scales = _unpack(packed, row)
    return _apply(quantise.e2m1_values(codes), quantise.e8m0_values(scales), row)


def row_bytes(packed: Packed, row: RowLayout) -> jax.Array:
    """The row in the byte order of the checkpoint's world: codes (two e2m1 a byte, even low), then scales."""
    codes, scales = _unpack(packed, row)
    if row.bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return jnp.concatenate([codes, scales], -1).astype(jnp.uint8)
