"""Rows in the page pools: what is written is read, nothing else changes, and no pool is copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.cache.layout import RowLayout, lines_for
from rorqual.cache.pools import RowPool, pack_words, read_rows, read_words, unpack_words, write_rows, write_words

OWNERS = 3
NUM_ROWS = 40
# The released rows take 128 and 4 (window), 64 and 8 (compressed), 16 and 1 (key) words; the rest are small models'.
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)
WRITE = jax.jit(write_words)
READ = jax.jit(read_words, static_argnums=3)

by_width = pytest.mark.parametrize("width", WIDTHS)


def random_words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def random_pool(width: int) -> np.ndarray:
    return random_words(width, OWNERS, lines_for(NUM_ROWS, width), 128)


def as_rows(pool: np.ndarray, width: int) -> np.ndarray:
    """The pool as rows `[owner, slot, width]`: slots in order fill lines in order."""
    return pool.reshape(OWNERS, -1, width)


@by_width
def test_written_rows_are_read_and_neighbours_untouched(width: int):
    pool, slots = random_pool(width), np.array([7, 0, 39, 8, 21], np.int32)
    rows = random_words(1, len(slots), width)
    written = np.asarray(WRITE(pool, 1, slots, rows))
    want = as_rows(pool.copy(), width)
    want[1, slots] = rows
    assert np.array_equal(as_rows(written, width), want)
    assert np.array_equal(READ(written, 1, slots, width), rows)


@by_width
def test_owners_are_separate(width: int):
    pool, slots = random_pool(width), np.arange(5, dtype=np.int32)
    for owner in range(OWNERS):
        pool = np.asarray(WRITE(pool, owner, slots, random_words(10 + owner, 5, width)))
    for owner in range(OWNERS):
        assert np.array_equal(READ(pool, owner, slots, width), random_words(10 + owner, 5, width))


@by_width
def test_negative_slots_are_dropped(width: int):
    pool, slots = random_pool(width), np.array([-1, 3, -1, -(2**31), -7], np.int32)
    rows = random_words(2, 5, width)
    want = as_rows(pool.copy(), width)
    want[2, 3] = rows[1]
    assert np.array_equal(as_rows(np.asarray(WRITE(pool, 2, slots, rows)), width), want)


@by_width
def test_rows_are_read_by_any_shape_of_slots(width: int):
    pool = random_pool(width)
    slots = np.random.default_rng(3).integers(0, NUM_ROWS, (4, 6), dtype=np.int32)
    assert np.array_equal(READ(pool, 2, slots, width), as_rows(pool, width)[2, slots])


@pytest.mark.parametrize("row", [RowLayout(512, 8, 32), RowLayout(512, 4, 16), RowLayout(128, 4, 32)])
def test_rows_have_data_and_scales(row: RowLayout):
    pool = RowPool(random_pool(row.data_words), random_pool(row.scale_words))
    data, scale = random_words(4, 2, row.data_words), random_words(5, 2, row.scale_words)
    slots = np.array([30, 2], np.int32)
    written = jax.jit(write_rows)(pool, 0, slots, data, scale)
    found = read_rows(written, 0, slots, row)
    assert np.array_equal(found[0], data) and np.array_equal(found[1], scale)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 40), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_unpacking_is_the_inverse_of_packing(bits: int, num_codes: int, spare_words: int, seed: int):
    words = -(-num_codes * bits // 32) + spare_words
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, num_codes), dtype=np.uint32)
    packed = pack_words(jnp.asarray(codes), bits, words)
    assert packed.shape == (3, words)
    assert np.array_equal(unpack_words(packed, bits, num_codes), codes)


def test_a_packed_row_loses_no_bit():
    """Words and codes of a full row are one to one: packing what was unpacked gives the words back."""
    for bits, words in ((8, 128), (4, 64), (4, 16), (8, 4), (8, 1)):
        row = random_words(6, 2, words)
        assert np.array_equal(pack_words(unpack_words(row, bits, words * 32 // bits), bits, words), row)


@pytest.mark.parametrize("row", [RowLayout(512, 8, 32), RowLayout(512, 4, 16), RowLayout(128, 4, 32)])
def test_a_donated_pool_is_written_in_place(row: RowLayout):
    """A write and a read of it in one program: no temporary of the size of a pool, and the buffers are reused."""
    num_rows, count = 1 << 15, 16

    def array(words: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((OWNERS, lines_for(num_rows, words), 128), jnp.uint32)

    pool = RowPool(array(row.data_words), array(row.scale_words))
    slots = jax.ShapeDtypeStruct((count,), jnp.int32)
    rows = [jax.ShapeDtypeStruct((count, words), jnp.uint32) for words in (row.data_words, row.scale_words)]

    def write_and_read(pool: RowPool, slots: jax.Array, data: jax.Array, scale: jax.Array):
        pool = write_rows(pool, jnp.int32(1), slots, data, scale)
        return pool, read_rows(pool, jnp.int32(1), slots[::-1] + 1, row)

    compiled = jax.jit(write_and_read, donate_argnums=0).lower(pool, slots, *rows).compile()
    memory = compiled.memory_analysis()
    smaller_array = min(pool.data.size, pool.scale.size) * 4
    assert memory.temp_size_in_bytes < smaller_array / 10
    assert memory.alias_size_in_bytes == (pool.data.size + pool.scale.size) * 4
