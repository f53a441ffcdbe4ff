"""Codes decode bit for bit as an independent decoder says (one number at a time, in float64, by ml_dtypes)."""

import ml_dtypes
import numpy as np
import pytest

from rorqual.model.number_formats import (
    NumberFormatError,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantise_fp4_rows,
    dequantise_fp8_rows,
    dequantise_fp8_tiles,
)

ALL = np.arange(256, dtype=np.uint8)
DTYPES = [np.float32, ml_dtypes.bfloat16]
EVERY_SCALE = [0, 1, 8, 100, 127, 128, 200, 246, 254]


def bits(values: np.ndarray) -> np.ndarray:
    """Compares -0 with 0 and NaN with NaN as they are stored."""
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def expected(codes: np.ndarray, kind: type, scale_bytes: np.ndarray, dtype: type) -> np.ndarray:
    """Product of decoded code and scale, exact in float64, rounded once; arguments of one shape."""
    with np.errstate(over="ignore", invalid="ignore"):
        scales = scale_bytes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return (codes.view(kind).astype(np.float64) * scales).astype(dtype)


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def random_codes(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return np.where((codes & 127) == 127, codes ^ 1, codes)


def random_scales(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 255, shape, dtype=np.uint8)


def test_every_e4m3_code():
    values = decode_e4m3(ALL)
    wanted = ALL.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.isfinite(wanted)
    assert np.array_equal(bits(values)[finite], bits(wanted)[finite])
    assert np.isnan(values[~finite]).all()
    assert np.flatnonzero(~finite).tolist() == [0x7F, 0xFF]


def test_every_scale():
    values = decode_e8m0(ALL[:255])
    assert np.array_equal(values.astype(np.float64), 2.0 ** (np.arange(255) - 127.0))
    with pytest.raises(NumberFormatError, match="255"):
        decode_e8m0(ALL)


def test_every_pair_of_nibbles():
    values = decode_e2m1(ALL.reshape(2, 128))
    wanted = nibbles(ALL.reshape(2, 128)).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(bits(values), bits(wanted))
    assert decode_e2m1(np.array([0x21], np.uint8)).tolist() == [0.5, 1.0]  # the even element is the low nibble


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (33, 32), (31, 64), (1, 32), (65, 40), (100, 33), (2000, 96)])
def test_fp8_tiles(shape: tuple[int, int], dtype: type):
    rows, columns = shape
    codes, scales = random_codes(shape), random_scales((-(-rows // 32), -(-columns // 32)))
    spread = np.repeat(np.repeat(scales, 32, axis=0), 32, axis=1)[:rows, :columns]
    values = dequantise_fp8_tiles(codes, scales, dtype)
    assert np.array_equal(bits(values), bits(expected(codes, ml_dtypes.float8_e4m3fn, spread, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (1, 32), (0, 32), (3000, 64)])
def test_fp8_rows(shape: tuple[int, int], dtype: type):
    codes, scales = random_codes(shape), random_scales((shape[0], shape[1] // 32))
    values = dequantise_fp8_rows(codes, scales, dtype)
    wanted = expected(codes, ml_dtypes.float8_e4m3fn, np.repeat(scales, 32, axis=1), dtype)
    assert np.array_equal(bits(values), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 32), (32, 16), (1, 48), (3, 24), (5000, 32)])
def test_fp4_rows(shape: tuple[int, int], dtype: type):
    rows, half = shape
    packed = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    scales = random_scales((rows, -(-2 * half // 32)))
    values = dequantise_fp4_rows(packed, scales, dtype)
    spread = np.repeat(scales, 32, axis=1)[:, : 2 * half]
    assert values.shape == (rows, 2 * half)
    assert np.array_equal(bits(values), bits(expected(nibbles(packed), ml_dtypes.float4_e2m1fn, spread, dtype)))


@pytest.mark.parametrize("byte", EVERY_SCALE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_extreme_scales(byte: int, dtype: type):
    """Subnormal and overflowing products round once, zeros keep their sign."""
    codes = np.where((ALL & 127) == 127, 0, ALL).reshape(1, 256)
    spread = np.full((1, 256), byte, np.uint8)
    values = dequantise_fp8_rows(codes, np.full((1, 8), byte, np.uint8), dtype)
    assert np.array_equal(bits(values), bits(expected(codes, ml_dtypes.float8_e4m3fn, spread, dtype)))
    pairs = dequantise_fp4_rows(ALL.reshape(1, 256), np.full((1, 16), byte, np.uint8), dtype)
    wanted = expected(nibbles(ALL.reshape(1, 256)), ml_dtypes.float4_e2m1fn, np.full((1, 512), byte, np.uint8), dtype)
    assert np.array_equal(bits(pairs), bits(wanted))


def test_bf16_is_exact_wherever_real_weights_are():
    """Every code at every scale from 2^-100 to 2^100: the bf16 weight is the float32 weight."""
    codes = np.tile(np.where((ALL & 127) == 127, 0, ALL), (201, 1))
    scales = np.repeat(np.arange(27, 228, dtype=np.uint8)[:, None], 8, axis=1)
    wide, narrow = dequantise_fp8_rows(codes, scales, np.float32), dequantise_fp8_rows(codes, scales)
    assert np.array_equal(bits(wide), bits(narrow.astype(np.float32)))


def test_noncontiguous_input():
    codes, scales = random_codes((64, 128)), random_scales((2, 4))
    whole = dequantise_fp8_tiles(codes, scales)
    part = dequantise_fp8_tiles(codes[:, 32:96], scales[:, 1:3])
    assert np.array_equal(bits(part), bits(np.ascontiguousarray(whole[:, 32:96])))


@pytest.mark.parametrize(
    ("decode", "columns", "shape"),
    [(dequantise_fp8_tiles, 64, (2, 2)), (dequantise_fp8_rows, 64, (40, 2)), (dequantise_fp4_rows, 32, (40, 2))],
)
def test_nan_scales_and_wrong_shapes_are_refused(decode, columns: int, shape: tuple[int, int]):
    codes, scales = random_codes((40, columns)), random_scales(shape)
    decode(codes, scales)
    scales[1, 1] = 255
    with pytest.raises(NumberFormatError, match=r"scale at \[1, 1\]: found byte 255"):
        decode(codes, scales)
    with pytest.raises(NumberFormatError, match="scales: found shape"):
        decode(codes, scales[:, :1])
    with pytest.raises(NumberFormatError, match="found float32"):
        decode(codes, scales.astype(np.float32))
