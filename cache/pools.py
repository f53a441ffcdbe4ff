"""The page pools on the device: arrays of 32-bit words, written and read by row.

A row's place is a *slot*: `page * rows_per_page + place in the page`. All functions take the pool as a value and
return it; inside the step the pool is donated, so an update is in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.cache.layout import LINE_WORDS, CacheLayout, RowLayout, lines_for

WORD = jnp.uint32


class RowPool(NamedTuple):
    """Rows of one kind: words `[owner, lines, 128]` of codes, and of scales. `owner` counts layers or KV sources."""

    data: jax.Array
    scale: jax.Array


class SourcePools(NamedTuple):
    """Compressed rows and index keys of the KV sources of one ratio."""

    kv: RowPool
    key: RowPool


class Pools(NamedTuple):
    """All pages of one rank."""

    window: RowPool
    sources: tuple[SourcePools, ...]


def _row_pool(owners: int, num_rows: int, row: RowLayout) -> RowPool:
    def words(per_row: int) -> Any:
        return jax.ShapeDtypeStruct((owners, lines_for(num_rows, per_row), LINE_WORDS), WORD)

    return RowPool(words(row.data_words), words(row.scale_words))


def abstract_pools(layout: CacheLayout, num_global_pages: int, num_window_pages: int) -> Pools:
    """Shapes of the pools for so many pages."""
    sources = tuple(
        SourcePools(
            _row_pool(len(group.layers), num_global_pages * group.rows_per_page, layout.kv_row),
            _row_pool(len(group.layers), num_global_pages * group.rows_per_page, layout.key_row),
        )
        for group in layout.groups
    )
    window = _row_pool(layout.num_window_layers, num_window_pages * layout.page_size, layout.window_row)
    return Pools(window, sources)


def _start_indices(owner: jax.Array, slots: jax.Array, words: int) -> jax.Array:
    """First word of each slot as (owner, line, column) `[..., 3]`."""
    if words > LINE_WORDS:
        line, column = slots * (words // LINE_WORDS), jnp.zeros_like(slots)
    else:
        per_line = LINE_WORDS // words
        line, column = slots // per_line, (slots % per_line) * words
    return jnp.stack([jnp.broadcast_to(jnp.asarray(owner, slots.dtype), slots.shape), line, column], -1)


def _window_shape(words: int) -> tuple[int, int]:
    return (words // LINE_WORDS, LINE_WORDS) if words > LINE_WORDS else (1, words)


def write_words(pool: jax.Array, owner: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    """Put rows `words [n, w]` at `slots [n]` (int32; a negative slot is dropped) of one owner."""
    width = words.shape[-1]
    start = _start_indices(owner, jnp.where(slots < 0, jnp.iinfo(jnp.int32).max // width, slots), width)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1, 2)
    )
    updates = words.reshape(words.shape[0], *_window_shape(width))
    return lax.scatter(pool, start, updates, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


def read_words(pool: jax.Array, owner: jax.Array, slots: jax.Array, width: int) -> jax.Array:
    """Rows at `slots [...]` of one owner -> `[..., width]`. A slot outside the pool reads some row: mask it after."""
    start = _start_indices(owner, slots, width)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(slots.ndim, slots.ndim + 1), collapsed_slice_dims=(0,), start_index_map=(0, 1, 2)
    )
    sizes = (1, *_window_shape(width))
    words = lax.gather(pool, start, numbers, sizes, mode=lax.GatherScatterMode.CLIP)
    return words.reshape(*slots.shape, width)


def write_rows(pool: RowPool, owner: jax.Array, slots: jax.Array, data: jax.Array, scale: jax.Array) -> RowPool:
    """Write packed rows (`pack_row`) at `slots [n]`.

    The barrier keeps a later read of the same step from making XLA copy the whole pool on CPU.
    """
    written = write_words(pool.data, owner, slots, data), write_words(pool.scale, owner, slots, scale)
    return RowPool(*lax.optimization_barrier(written))


def read_rows(pool: RowPool, owner: jax.Array, slots: jax.Array, row: RowLayout) -> tuple[jax.Array, jax.Array]:
    """Packed rows at `slots [...]` -> (data words `[..., d]`, scale words `[..., s]`)."""
    return (
        read_words(pool.data, owner, slots, row.data_words),
        read_words(pool.scale, owner, slots, row.scale_words),
    )


def pack_words(codes: jax.Array, bits: int, words: int) -> jax.Array:
    """uint32 codes `[..., n]` -> words `[..., words]`.

    Code f lies in word f % words at place f // words: unpacking is a shift of the whole row and a concatenation, and
    never moves data between lanes.
    """
    planes = 32 // bits
    short = planes * words - codes.shape[-1]
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)]) if short else codes
    places = padded.astype(WORD).reshape(*codes.shape[:-1], planes, words)
    shifts = (jnp.arange(planes, dtype=WORD) * bits)[:, None]
    return lax.reduce(places << shifts, WORD(0), lax.bitwise_or, (places.ndim - 2,))


def unpack_words(words: jax.Array, bits: int, num_codes: int) -> jax.Array:
    """Inverse of `pack_words`: `[..., w]` -> uint32 codes `[..., num_codes]`."""
    planes = -(-num_codes // words.shape[-1])
    mask = WORD((1 << bits) - 1)
    places = [(words >> WORD(bits * plane)) & mask for plane in range(planes)]
    return jnp.concatenate(places, -1)[..., :num_codes]
