"""What a layer needs to know about a step: its tokens, where their pages are, and which pools it may touch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rorqual.cache.layout import CacheLayout
from rorqual.cache.pools import Pools


class Tokens(NamedTuple):
    """The flat batch of a step (or a tile of it), every array `[T]`.

    `position` in the sequence, `seat` of the request, `follows`: the entry before is the same row's previous token,
    `ends`: last of its row in this step, `valid`: not padding, `image`: an image token.
    """

    token: jax.Array
    position: jax.Array
    seat: jax.Array
    follows: jax.Array
    ends: jax.Array
    valid: jax.Array
    image: jax.Array


class Tables(NamedTuple):
    """Page tables by seat, int32 `[seats, pages]`, indexed by position // page size in either id space."""

    global_pages: jax.Array
    window_pages: jax.Array


class CacheState(NamedTuple):
    """The paged state that layers read and write, and the half-filled pairs of ratio-2 sources.

    `pairs` float32 `[sources, seats, 2, C]`: kv and score of a token whose partner has not come.
    """

    pools: Pools
    pairs: jax.Array


def slots_of(pages: jax.Array, seat: jax.Array, row: jax.Array, rows_per_page: int) -> jax.Array:
    """Slots of rows by their number in the sequence: `pages [seats, n]`, `seat [t]`, `row [t, ...]` -> int32 as row."""
    page = jnp.clip(row // rows_per_page, 0, pages.shape[1] - 1)
    seats = seat.reshape(seat.shape + (1,) * (row.ndim - 1))
    return pages[seats, page] * rows_per_page + row % rows_per_page


def window_bank(tokens: Tokens, tables: Tables, layout: CacheLayout) -> tuple[jax.Array, jax.Array]:
    """Window slots of each token, oldest first, and which are there: (int32, bool) `[t, W]`."""
    back = jnp.arange(layout.page_size - 1, -1, -1, dtype=jnp.int32)
    position = tokens.position[:, None] - back
    return slots_of(tables.window_pages, tokens.seat, position, layout.page_size), position >= 0
