"""Row tiles: how the per-token work of a layer is cut.

Everything per token can run on tiles of a fixed number of rows. The loop's trip count is data, also where one tile is
all there is, so the compiler can neither unroll nor specialise it. And a barrier stands where a tile is taken and where
it is put back: otherwise slicing and writing back fuse with the arithmetic, another way where the tile is the whole
step, and a fused multiply-add here and there makes another last bit. So a token's numbers depend neither on the bucket
nor on its place in it. Without a tile the same body runs once on the whole step.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def over_tiles(num_rows: jax.Array, tile: int | None, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = body(start, carry)` for starts 0, tile, 2*tile, ... below `num_rows` (traced). Tile None: once."""
    if tile is None:
        return body(0, carry)
    return lax.fori_loop(0, (num_rows + tile - 1) // tile, lambda i, c: body(i * tile, c), carry)


def take(tree: Any, start: Any, tile: int | None) -> Any:
    """Rows start..start+tile of every array of a tree (leading axis)."""
    if tile is None:
        return tree
    return lax.optimization_barrier(
        jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, min(tile, x.shape[0]), 0), tree)
    )


def put(tree: Any, part: Any, start: Any) -> Any:
    """Write a tile back where `take` found it; `start` as `over_tiles` gives it (a plain 0: the part is the whole)."""
    if isinstance(start, int):
        return part

    def paste(x: jax.Array, y: jax.Array) -> jax.Array:
        return y if y.shape[0] >= x.shape[0] else lax.dynamic_update_slice_in_dim(x, y, start, 0)

    return jax.tree.map(paste, tree, lax.optimization_barrier(part))
