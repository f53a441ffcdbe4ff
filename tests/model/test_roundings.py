"""Roundings that the model names survive jit, and the selection without a sort equals a stable sort."""

from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.model.kernels.grouped_experts.reference import expert_tile, swiglu
from rorqual.model.kernels.hyper_connections.reference import narrow
from rorqual.model.kernels.index_select.reference import best_mask, compact, index_scores, merge_best, no_selection
from rorqual.model.layers.linear import RMSNorm
from rorqual.model.numerics import bf16, dot, round_bf16
from rorqual.model.quantise import fp8_roundtrip

BF16 = ml_dtypes.bfloat16
F32 = np.float32
MAX_WIDTH = 12
NUM_ROWS = 4


def rounded(x: np.ndarray) -> np.ndarray:
    """One rounding to bf16, in numpy."""
    return x.astype(F32).astype(BF16).astype(F32)


def random_bf16(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def test_numpy_and_jit_round_alike():
    x = np.random.default_rng(0).standard_normal(4096).astype(F32)
    assert np.array_equal(jax.jit(round_bf16)(x), rounded(x))
    twice = jax.jit(lambda x: bf16(bf16(x).astype(jnp.float32) * 3).astype(jnp.float32))(x)
    assert np.array_equal(twice, rounded(rounded(x) * 3))


def test_index_scores_round_at_every_step():
    q, keys, weights = random_bf16(1, 8, 4, 16), random_bf16(2, 32, 16), random_bf16(3, 8, 4)
    # Small integers keep every product and sum exact, so only the roundings decide.
    q, keys = (np.round(x.astype(F32) * 8).astype(BF16) for x in (q, keys))
    found = np.asarray(jax.jit(index_scores)(q, keys, weights))
    products = rounded(np.einsum("tnd,gd->tng", q.astype(F32), keys.astype(F32)))
    weighted = np.maximum(products, 0) * weights.astype(F32)[..., None]
    want = rounded(rounded(weighted).astype(np.float64).sum(1))
    assert np.array_equal(found, want)
    assert not np.array_equal(found, rounded(weighted.sum(1))), "the roundings inside must matter here"


def test_narrow_rounds_before_the_norm(rules: ModuleType):
    stream, pre = random_bf16(4, 16, 4, 64), np.random.default_rng(5).uniform(0, 1, (16, 4)).astype(F32)
    weight = random_bf16(6, 64)
    norm = RMSNorm({"weight": jnp.asarray(weight)}, 1e-20)
    found = jax.jit(lambda stream, pre: norm(narrow(stream, pre)))(stream, pre)
    wide = (stream.astype(np.float64) * pre[..., None]).sum(1)

    def normed(x: np.ndarray) -> np.ndarray:
        return (x / np.sqrt(np.mean(np.square(x), -1, keepdims=True)) * weight.astype(np.float64)).astype(BF16)

    rules.check_equal_share("narrow, then norm", found, normed(rounded(wide).astype(np.float64)), share=0.99)
    assert np.mean(np.asarray(found) == normed(wide)) < 0.9


def test_an_expert_rounds_both_projections_and_the_hidden_row(rules: ModuleType):
    x, weight = random_bf16(7, 8, 64), np.random.default_rng(8).uniform(0.1, 1, (8, 1)).astype(F32)
    w1, w3, w2 = random_bf16(9, 32, 64), random_bf16(10, 32, 64), random_bf16(11, 64, 32)
    x = np.asarray(fp8_roundtrip(x))
    found = jax.jit(lambda *a: expert_tile(*a, 10.0))(x, weight, w1, w2, w3)

    def by_steps(keep: bool) -> np.ndarray:
        step = rounded if keep else (lambda x: x)
        gate, up = (step(x.astype(F32) @ w.astype(F32).T) for w in (w1, w3))
        hidden = step(weight * np.asarray(swiglu(gate, up, 10.0)))
        quantised = np.asarray(fp8_roundtrip(hidden)).astype(F32)
        return (quantised @ w2.astype(F32).T).astype(BF16)

    rules.check_equal_share("expert", found, by_steps(True), share=0.99)
    assert np.mean(np.asarray(found) == by_steps(False)) < 0.97


def test_a_product_is_summed_in_float32():
    x, weight = random_bf16(12, 4, 512), random_bf16(13, 8, 512)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    for kind in (BF16, F32):
        found = jax.jit(dot)(x, weight.astype(kind))
        assert found.dtype == jnp.float32
        assert np.max(np.abs(found - want)) < 1e-4


# Few distinct values, so that ties are the rule: both zeros, infinities, numbers near the ends of the range.
VALUES = np.array([0.0, -0.0, 1.0, 1.0078125, -1.0, 2.0, -2.0, 2e-38, -2e-38, 3e38, np.inf, -np.inf], BF16).astype(F32)
MASK = jax.jit(best_mask, static_argnums=1)
COMPACT = jax.jit(compact, static_argnums=1)
MERGE = jax.jit(merge_best)
SIZES = (1, 3, 5)


def stable_best(scores: np.ndarray, k: int) -> list[int]:
    """Places of the k best present scores, ties to the lower place, rising."""
    order = sorted(np.flatnonzero(scores != -np.inf), key=lambda place: (-scores[place], place))
    return sorted(int(place) for place in order[:k])


scores_strategy = st.lists(
    st.lists(st.sampled_from(range(len(VALUES))), min_size=MAX_WIDTH, max_size=MAX_WIDTH),
    min_size=NUM_ROWS,
    max_size=NUM_ROWS,
).map(lambda places: VALUES[np.array(places)])


@settings(max_examples=60, deadline=None)
@given(scores_strategy, st.sampled_from(SIZES))
def test_best_mask_is_a_stable_selection(scores: np.ndarray, k: int):
    mask = np.asarray(MASK(scores, k))
    places = np.asarray(COMPACT(mask, k))
    for row in range(NUM_ROWS):
        want = stable_best(scores[row], k)
        assert np.flatnonzero(mask[row]).tolist() == want
        assert places[row].tolist() == want + [MAX_WIDTH] * (k - len(want))


def chunk(scores: np.ndarray, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores start..end, filled up with absent ones to a width that is compiled once; positions rise by three."""
    width = end - start
    part = np.full((NUM_ROWS, MAX_WIDTH), -np.inf, F32)
    part[:, :width] = scores[:, start:end]
    positions = np.broadcast_to(100 + 3 * (start + np.arange(MAX_WIDTH, dtype=np.int32)), part.shape)
    return part, positions


@settings(max_examples=20, deadline=None)
@given(scores_strategy, st.sampled_from(SIZES))
def test_a_selection_in_chunks_is_the_selection_of_the_whole(scores: np.ndarray, k: int):
    for cut in range(MAX_WIDTH + 1):
        best = MERGE(no_selection(NUM_ROWS, k), *chunk(scores, 0, cut))
        kept, positions = (np.asarray(x) for x in MERGE(best, *chunk(scores, cut, MAX_WIDTH)))
        for row in range(NUM_ROWS):
            want = stable_best(scores[row], k)
            empty = k - len(want)
            assert positions[row].tolist() == [100 + 3 * place for place in want] + [-1] * empty
            assert kept[row].tolist() == [*scores[row][want], *[-np.inf] * empty]


@pytest.mark.parametrize("k", [1, 16, 512])
def test_random_scores_at_width(k: int):
    scores = np.round(np.random.default_rng(k).standard_normal((3, 2000)) * 8).astype(BF16).astype(F32)
    scores[2, 300:] = -np.inf
    mask = np.asarray(best_mask(scores, k))
    for row in range(3):
        assert np.flatnonzero(mask[row]).tolist() == stable_best(scores[row], k)
