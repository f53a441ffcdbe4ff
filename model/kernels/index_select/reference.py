"""Index scores and the selection they make (spec section 6).

Scores are bf16 numbers, so a selection is exact counting on 16-bit keys: the k-th best by bisection over the bits,
ties to the lower position, results in rising order, and no sort.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import F32, round_bf16

NONE = -1


def index_scores(q: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
    """`q [t, n, d]`, `keys [t, g, d]` (or `[g, d]` shared), `weights [t, n]` bfloat16 -> float32 `[t, g]` holding bf16.

    Rounded to bf16 as the reference does: each product q.k, each product with w, the sum over heads.
    """
    if keys.ndim == 2:
        products = jnp.einsum("tnd,gd->tng", q, keys, preferred_element_type=F32)
    else:
        products = jnp.einsum("tnd,tgd->tng", q, keys, preferred_element_type=F32)
    weighted = round_bf16(jax.nn.relu(round_bf16(products)) * weights[..., None].astype(F32))
    return round_bf16(jnp.sum(weighted, 1))


def _sortable(scores: jax.Array) -> jax.Array:
    """bf16 numbers in float32 -> int32 in [1, 65535] with the same order (-0 = 0); -inf, the mark of absence, -> 0."""
    scores = jnp.where(scores == 0, 0.0, scores)
    bits = (lax.bitcast_convert_type(scores, jnp.uint32) >> 16).astype(jnp.int32)
    ordered = jnp.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return jnp.where(scores == -jnp.inf, 0, jnp.maximum(ordered, 1))


def _kth_best(keys: jax.Array, k: int) -> jax.Array:
    """Largest threshold `[t]` that at least k keys of `[t, n]` reach, 0 when fewer than k are present."""

    def one_bit(i: int, threshold: jax.Array) -> jax.Array:
        raised = threshold | (0x8000 >> i)
        enough = jnp.sum(keys >= raised[:, None], 1) >= k
        return jnp.where(enough, raised, threshold)

    return lax.fori_loop(0, 16, one_bit, jnp.zeros(keys.shape[0], jnp.int32))


def best_mask(scores: jax.Array, k: int) -> jax.Array:
    """The k best present entries of `[t, n]` (-inf = absent; all when fewer), ties to the lower place -> bool."""
    keys = _sortable(scores)
    threshold = _kth_best(keys, k)[:, None]
    above = keys > threshold
    ties = (keys == threshold) & (keys > 0)
    room = k - jnp.sum(above, 1, keepdims=True)
    return above | (ties & (jnp.cumsum(ties, 1) <= room))


def compact(mask: jax.Array, k: int) -> jax.Array:
    """Places of the True entries of `[t, n]` in rising order -> int32 `[t, k]`, n where there are no more."""
    counts = jnp.cumsum(mask, 1)
    wanted = jnp.arange(1, k + 1)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, side="left"))(counts).astype(jnp.int32)


Selection = tuple[jax.Array, jax.Array]  # scores [t, k] float32 (-inf = empty), positions [t, k] int32, rising (-1)


def no_selection(num_queries: int, k: int) -> Selection:
    """A selection with every place empty."""
    return jnp.full((num_queries, k), -jnp.inf), jnp.full((num_queries, k), NONE, jnp.int32)


def merge_best(best: Selection, scores: jax.Array, positions: jax.Array) -> Selection:
    """Add `scores [t, n]` at `positions [t, n]`, all beyond the positions already there, and keep the best k.

    Chunk after chunk this keeps the same set as one selection from everything.
    """
    k = best[0].shape[1]
    all_scores = jnp.concatenate([best[0], scores], 1)
    all_positions = jnp.concatenate([best[1], positions], 1)
    places = compact(best_mask(all_scores, k), k)
    taken = places < all_scores.shape[1]
    pick = jnp.minimum(places, all_scores.shape[1] - 1)
    return (
        jnp.where(taken, jnp.take_along_axis(all_scores, pick, 1), -jnp.inf),
        jnp.where(taken, jnp.take_along_axis(all_positions, pick, 1), NONE),
    )


def merge_blocks(
    best: Selection, scores: jax.Array, first: jax.Array, visible: jax.Array, block_size: int
) -> Selection:
    """Candidate blocks: merge block maxima of `scores [t, n]` (-inf where not visible), groups first..first+n.

    The block with the newest visible group counts as +inf. Blocks without a visible group are absent.
    """
    maxima = jnp.max(scores.reshape(scores.shape[0], -1, block_size), -1)
    blocks = first // block_size + jnp.arange(maxima.shape[1], dtype=jnp.int32)
    newest = ((visible - 1) // block_size)[:, None]
    maxima = jnp.where((blocks == newest) & (visible > 0)[:, None], jnp.inf, maxima)
    return merge_best(best, maxima, jnp.broadcast_to(blocks, maxima.shape))
