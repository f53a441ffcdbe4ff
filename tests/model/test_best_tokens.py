"""Top-k and top-p keep what sorting would keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model.sampling import Sampling, _among_best

ROWS = 24


def kept_by_sorting(scaled: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The definition, in float64: the k best, then of these the fewest whose probability reaches top_p; with ties."""
    kept = np.zeros(scaled.shape, bool)
    for row, logits in enumerate(scaled.astype(np.float64)):
        order = np.argsort(-logits, kind="stable")
        k = top_k[row] if 0 < top_k[row] <= len(logits) else len(logits)
        weights = np.where(logits >= logits[order[k - 1]], np.exp(logits - logits.max()), 0)
        before = np.cumsum(weights[order]) - weights[order]
        nucleus = (before < top_p[row] * weights.sum()) & (weights[order] > 0) if top_p[row] < 1 else weights[order] > 0
        kept[row] = logits >= logits[order][nucleus].min()
    return kept


@pytest.mark.parametrize("vocab", [1, 7, 1000])
@pytest.mark.parametrize("spread", [0.1, 1.5, 20.0])
@pytest.mark.parametrize("tied", [False, True])
def test_what_top_k_and_top_p_keep(vocab: int, spread: float, tied: bool) -> None:
    rng = np.random.default_rng(vocab)
    scaled = (rng.standard_normal((ROWS, vocab)) * spread).astype(np.float32)
    if tied:
        scaled = np.round(scaled * 4) / 4  # both zeros among them
    scaled[:4, 1 : vocab // 2] = -np.inf
    top_k = rng.choice([0, 1, 5, 50, 10**6], ROWS).astype(np.int32)
    top_k[:4] = 2
    top_p = rng.choice([0.05, 0.5, 0.9, 0.99, 1.0], ROWS).astype(np.float32)
    params = Sampling(*[jnp.zeros(ROWS)] * len(Sampling._fields))._replace(top_k=top_k, top_p=top_p)
    kept = np.asarray(jax.jit(_among_best)(scaled, params))
    finite = np.isfinite(scaled)
    np.testing.assert_array_equal(kept & finite, kept_by_sorting(scaled, top_k, top_p) & finite)
