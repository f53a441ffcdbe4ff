"""The sampler against definitions written in numpy: which tokens may come, how often, and what each option does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model.sampling import Sampling, sample

VOCAB, ROWS, BIAS, BANNED = 50, 512, 4, 3
WORDS = -(-VOCAB // 32)
run = jax.jit(sample)


def sampling(**columns) -> Sampling:
    """Neutral parameters for every row, with some replaced (a number: for all rows)."""
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence": 0.0,
        "frequency": 0.0,
        "repetition": 1.0,
        "top_k": 0,
    }
    arrays = {name: np.full(ROWS, columns.pop(name, value), type(value)) for name, value in neutral.items()}
    arrays = {name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32) for name, x in arrays.items()}
    seed = np.stack([np.zeros(ROWS), np.arange(ROWS)], 1).astype(np.uint32)
    lists = {
        "seed": seed,
        "bias_ids": np.full((ROWS, BIAS), -1, np.int32),
        "bias_values": np.zeros((ROWS, BIAS), np.float32),
        "banned": np.full((ROWS, BANNED), -1, np.int32),
    }
    return Sampling(**arrays, **(lists | columns))


def draw(logits, s=None, counts=None, seen=None, mask=None, position=None, wants=False):
    """One token for each of ROWS rows with the same logits (or their own)."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (ROWS, VOCAB))
    counted = counts is not None
    counts = np.zeros((1, VOCAB), np.int32) if counts is None else counts[None]
    seen = np.zeros((1, VOCAB), np.int32) if seen is None else seen[None]
    row = np.full(ROWS, 0 if counted else -1, np.int32)
    words = np.zeros((ROWS, WORDS), np.uint32) if mask is None else np.broadcast_to(mask, (ROWS, WORDS))
    position = np.full(ROWS, 7, np.int32) if position is None else position
    masked = np.full(ROWS, mask is not None)
    return run(
        logits, s or sampling(), (jnp.asarray(counts), jnp.asarray(seen), row), words, masked, position,
        np.full(ROWS, wants),
    )  # fmt: skip


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max())
    return weights / weights.sum()


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that may be drawn: the k best, of these the fewest best that reach top_p, and of these the ones with at
    least min_p times the best probability."""
    scaled = logits / temperature
    order = np.argsort(-scaled, kind="stable")[: top_k or VOCAB]
    p = softmax(scaled[order])
    kept = order[np.cumsum(p) - p < top_p]
    return {int(i) for i in kept if softmax(scaled)[i] >= min_p * softmax(scaled).max()}


def test_the_best_token_is_taken_and_ties_go_to_the_lower_id(logits):
    tied = logits.copy()
    tied[[11, 30, 42]] = logits.max() + 1
    assert set(np.asarray(draw(tied, sampling(temperature=0.0)).token)) == {11}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (2.0, 0, 1.0, 0.2),
        (1.5, 8, 0.8, 0.0),
        (0.7, 10, 0.9, 0.1),
        (3.0, 1, 1.0, 0.0),
    ],
)
def test_just_the_allowed_tokens_come(logits, temperature, top_k, top_p, min_p):
    s = sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = allowed(logits, temperature, top_k, top_p, min_p)
    found: set[int] = set()
    for position in range(12):
        found |= set(np.asarray(draw(logits, s, position=np.full(ROWS, position, np.int32)).token).tolist())
    assert found <= wanted
    likely = {i for i in wanted if softmax(logits / temperature)[i] > 0.004}
    assert likely <= found, "a token that should have come did not"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_tokens_come_as_often_as_their_probability_says(logits, temperature):
    counts = np.zeros(VOCAB)
    for position in range(20):
        tokens = draw(logits, sampling(temperature=temperature), position=np.full(ROWS, position, np.int32)).token
        counts += np.bincount(np.asarray(tokens), minlength=VOCAB)
    expected = softmax(logits / temperature) * counts.sum()
    large = expected >= 5
    chi = np.sum((counts - expected)[large] ** 2 / expected[large])
    rest = counts[~large].sum() - expected[~large].sum()
    freedom = large.sum()
    assert chi + rest**2 / max(expected[~large].sum(), 1) < freedom + 4 * np.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_and_position_alone(logits):
    position = np.arange(ROWS, dtype=np.int32) % 5
    first = np.asarray(draw(logits, position=position).token)
    order = np.random.default_rng(1).permutation(ROWS)
    moved = sampling(seed=sampling().seed[order])
    assert (np.asarray(draw(logits, moved, position=position[order]).token) == first[order]).all()
    assert (np.asarray(draw(logits, position=position + 1).token) != first).mean() > 0.5
    other = sampling(seed=sampling().seed + np.array([1, 0], np.uint32))
    assert (np.asarray(draw(logits, other, position=position).token) != first).mean() > 0.5


def test_penalties_bias_and_bans_change_the_logits_by_their_formula(logits):
    rng = np.random.default_rng(2)
    counts, seen = rng.integers(0, 3, VOCAB).astype(np.int32), rng.integers(0, 2, VOCAB).astype(np.int32)
    each = np.random.default_rng(3).normal(0, 1.5, (ROWS, VOCAB)).astype(np.float32)
    ids = np.tile(np.array([4, 9, -1, -1], np.int32), (ROWS, 1))
    values = np.tile(np.array([3.0, -2.0, 9.0, 9.0], np.float32), (ROWS, 1))
    s = sampling(
        temperature=0.0, presence=0.7, frequency=0.4, repetition=1.3, bias_ids=ids, bias_values=values,
        banned=np.tile(np.array([17, 4, -1], np.int32), (ROWS, 1)),
    )  # fmt: skip
    wanted = np.where((counts > 0) | (seen > 0), np.where(each > 0, each / 1.3, each * 1.3), each)
    wanted = wanted - 0.4 * counts - 0.7 * (counts > 0)
    wanted[:, 9] -= 2
    wanted[:, [4, 17]] = -np.inf
    assert (np.asarray(draw(each, s, counts, seen).token) == wanted.argmax(1)).all()


def test_a_mask_allows_what_its_bits_say(logits):
    ids = [3, 31, 32, 49]
    mask = np.zeros(WORDS, np.uint32)
    for token in ids:
        mask[token // 32] |= np.uint32(1 << token % 32)
    found = set(np.asarray(draw(logits, sampling(temperature=5.0), mask=mask).token).tolist())
    assert found == set(ids)
    best = max(ids, key=lambda token: logits[token])
    assert set(np.asarray(draw(logits, sampling(temperature=0.0), mask=mask).token)) == {best}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_number_give_no_token(logits, temperature):
    broken = np.broadcast_to(logits, (ROWS, VOCAB)).copy()
    broken[3, 5], broken[7], broken[9, 1] = np.nan, -np.inf, np.inf
    tokens = np.asarray(draw(broken, sampling(temperature=temperature)).token)
    assert set(np.flatnonzero(tokens < 0)) == {3, 7, 9}


def test_log_probabilities_are_the_models_own(logits):
    s = sampling(temperature=2.0, top_k=3)
    found = draw(logits, s, wants=True)
    wanted = np.log(softmax(logits))
    np.testing.assert_allclose(np.asarray(found.logprob), wanted[np.asarray(found.token)], atol=2e-6)
    order = np.argsort(-logits, kind="stable")[:20]
    assert (np.asarray(found.alternative_ids) == order).all()
    np.testing.assert_allclose(np.asarray(found.alternative_logprobs)[0], wanted[order], atol=2e-6)
