"""Row tiles: how the per-token work of a layer is cut.

Everything per token runs on tiles of a fixed number of rows. When the tile is smaller than the step, the loop's trip
count is data, so the compiler can neither unroll nor specialise it, and a token's numbers depend neither on the
bucket nor on its place in it. When the tile is as large as the step, the same body runs once.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def over_tiles(num_rows: jax.Array, total: int, tile: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = body(start, carry)` for starts 0, tile, 2*tile, ... below `num_rows` (traced); `total` rows in all."""
    if tile >= total:
        return body(0, carry)
    return lax.fori_loop(0, (num_rows + tile - 1) // tile, lambda i, c: body(i * tile, c), carry)


def take(tree: Any, start: Any, tile: int) -> Any:
    """Rows start..start+tile of every array of a tree (leading axis)."""

    def cut(x: jax.Array) -> jax.Array:
        return x if tile >= x.shape[0] else lax.dynamic_slice_in_dim(x, start, tile, 0)

    return jax.tree.map(cut, tree)


def put(tree: Any, part: Any, start: Any) -> Any:
    """Write a tile back where `take` found it."""

    def paste(x: jax.Array, y: jax.Array) -> jax.Array:
        return y if y.shape[0] >= x.shape[0] else lax.dynamic_update_slice_in_dim(x, y, start, 0)

    return jax.tree.map(paste, tree, part)
