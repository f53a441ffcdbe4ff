"""Stored numbers of the checkpoint, decoded on the host: e4m3, E8M0 and e2m1 codes, and the weights made of them.

A byte under a scale stands for one of 65,536 products (256 codes or pairs of codes x 256 scales), so a weight is
decoded by one look-up per byte in a table of products (spec section 2). Every product of real weights is exactly a bf16
number; near the ends of the exponent range, where it is not, the table holds the product rounded once. No jax here.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

GROUP = 32  # weights that share one scale: 32 along a row (FP4, Engram rows) or a tile of 32x32 (FP8 linears)
SCALE_NAN = 255
_CHUNK_BYTES = 1 << 18  # bytes decoded at a time: their 64-bit indices take 2 MiB, about a CPU cache

_BYTES = np.arange(256)
# Bit 7 sign, bits 3..6 exponent (bias 7), bits 0..2 mantissa; exponent 0 is subnormal; 0x7f and 0xff are NaN.
_E4M3_EXPONENT, _E4M3_MANTISSA = (_BYTES >> 3) & 15, _BYTES & 7
_E4M3_SIZE = np.where(
    _E4M3_EXPONENT == 0,
    np.ldexp(_E4M3_MANTISSA, -9),
    np.ldexp(8 + _E4M3_MANTISSA, _E4M3_EXPONENT - 10),
)
_E4M3_SIZE[(_BYTES & 127) == 127] = np.nan
E4M3_VALUES = np.copysign(_E4M3_SIZE, np.where(_BYTES & 128, -1.0, 1.0)).astype(np.float32)
_E8M0 = np.ldexp(1.0, _BYTES - 127)
_E8M0[SCALE_NAN] = np.nan
E8M0_VALUES = _E8M0.astype(np.float32)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

FloatDtype = npt.DTypeLike


class NumberFormatError(ValueError):
    """Codes and scales do not fit together, or a scale is not a number. Names what was found and what is allowed."""


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes of any shape to float32 of the same shape, exact; 0x7f and 0xff become NaN."""
    return np.take(E4M3_VALUES, codes)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """uint8 codes b of any shape to float32 2^(b - 127), exact. Raises NumberFormatError for code 255 (NaN)."""
    _refuse_nan(codes)
    return np.take(E8M0_VALUES, codes)


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., n] of two codes each (even element in the low nibble) to float32 [..., 2n], exact."""
    pairs = np.take(_pair_values(), packed, axis=0)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantise_fp8_tiles(codes: np.ndarray, scales: np.ndarray, dtype: FloatDtype = ml_dtypes.bfloat16) -> np.ndarray:
    """FP8 linear weight: e4m3 codes [out, in] under E8M0 scales [ceil(out/32), ceil(in/32)] to float [out, in].

    `dtype` is bfloat16 or float32. Raises NumberFormatError for scales of another shape and for a NaN scale.
    """
    rows, columns = codes.shape
    _check(codes, scales, (-(-rows // GROUP), -(-columns // GROUP)))
    return _look_up(_e4m3_products(np.dtype(dtype)), codes, scales, rows_per_scale=GROUP, bytes_per_scale=GROUP)


def dequantise_fp8_rows(codes: np.ndarray, scales: np.ndarray, dtype: FloatDtype = ml_dtypes.bfloat16) -> np.ndarray:
    """Engram rows: e4m3 codes [n, d] under E8M0 scales [n, d/32] to float [n, d]. Errors as `dequantise_fp8_tiles`."""
    rows, columns = codes.shape
    _check(codes, scales, (rows, -(-columns // GROUP)))
    return _look_up(_e4m3_products(np.dtype(dtype)), codes, scales, rows_per_scale=1, bytes_per_scale=GROUP)


def dequantise_fp4_rows(packed: np.ndarray, scales: np.ndarray, dtype: FloatDtype = ml_dtypes.bfloat16) -> np.ndarray:
    """Routed expert weight: bytes [out, in/2] of two e2m1 codes under E8M0 scales [out, in/32] to float [out, in].

    `dtype` is bfloat16 or float32. Raises NumberFormatError for scales of another shape and for a NaN scale.
    """
    rows, columns = packed.shape
    _check(packed, scales, (rows, -(-2 * columns // GROUP)))
    table = _e2m1_pair_products(np.dtype(dtype))
    pairs = _look_up(table, packed, scales, rows_per_scale=1, bytes_per_scale=GROUP // 2)
    return pairs.view(np.dtype(dtype))


def _check(codes: np.ndarray, scales: np.ndarray, expected: tuple[int, int]) -> None:
    for name, array in (("codes", codes), ("scales", scales)):
        if array.dtype != np.uint8:
            raise NumberFormatError(f"{name}: found {array.dtype}, expected uint8 codes")
    if scales.shape != expected:
        raise NumberFormatError(f"scales: found shape {scales.shape}, expected {expected} for codes {codes.shape}")
    _refuse_nan(scales)


def _refuse_nan(scales: np.ndarray) -> None:
    if scales.size and scales.max() == SCALE_NAN:
        where = [int(i) for i in np.argwhere(scales == SCALE_NAN)[0]]
        raise NumberFormatError(f"scale at {where}: found byte {SCALE_NAN} (NaN), allowed 0..{SCALE_NAN - 1}")


def _look_up(
    table: np.ndarray, codes: np.ndarray, scales: np.ndarray, rows_per_scale: int, bytes_per_scale: int
) -> np.ndarray:
    """table[scale * 256 + code] for every byte, each scale covering `rows_per_scale` x `bytes_per_scale` bytes."""
    rows, columns = codes.shape
    result = np.empty(codes.shape, table.dtype)
    step = max(1, _CHUNK_BYTES // max(columns, 1))
    offsets = scales.astype(np.intp) << 8
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        index = codes[start:stop].astype(np.intp)
        own = offsets[np.arange(start, stop) // rows_per_scale]
        index += np.repeat(own, bytes_per_scale, axis=1)[:, :columns]
        # Every index is below 65,536 by construction; the other modes of take would check it again.
        np.take(table, index, out=result[start:stop], mode="wrap")
    return result


@cache
def _e4m3_products(dtype: np.dtype[Any]) -> np.ndarray:
    """Value of e4m3 code c under scale byte b at b * 256 + c."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.outer(_E8M0, E4M3_VALUES.astype(np.float64)).astype(dtype).ravel()


@cache
def _e2m1_pair_products(dtype: np.dtype[Any]) -> np.ndarray:
    """Both values of byte c under scale byte b at b * 256 + c, as one integer twice as wide as `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = (_E8M0[:, None, None] * _pair_values()).astype(dtype)
    return values.reshape(65536, 2).view(f"u{2 * dtype.itemsize}").ravel()


@cache
def _pair_values() -> np.ndarray:
    """float32 [256, 2]: the two e2m1 values of a byte, low nibble first."""
    return np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=-1)
