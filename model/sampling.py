"""From logits to tokens, inside the step. What no row asks for is skipped at run time: a greedy step sorts nothing.

Randomness is a function of (request seed, position) alone: neither the batch nor the step a token falls into matters.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rorqual.model.numerics import F32

NUM_ALTERNATIVES = 20  # returned beside the sampled token when any row wants log-probabilities


class Sampling(NamedTuple):
    """Sampling parameters by row, every array `[R, ...]`.

    `temperature` 0: greedy; `top_k` 0 and `top_p` 1 and `min_p` 0: off; `seed [R, 2]` uint32 words;
    `bias_ids`, `bias_values [R, B]` (id -1: unused); `banned [R, S]` ids that must not come now (-1: unused);
    `counts`, `seen [R, V]` occurrences among generated and prompt tokens, zero for rows without penalties.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    top_k: jax.Array
    seed: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    banned: jax.Array


class Sampled(NamedTuple):
    """`token [R]` (-1: the logits held no number), `logprob [R]`, best alternatives `[R, 20]` (ids, log-probabilities).

    Log-probabilities are those of the model itself, before temperature, penalties and masks; zeros when no row wants
    them.
    """

    token: jax.Array
    logprob: jax.Array
    alternative_ids: jax.Array
    alternative_logprobs: jax.Array


def nothing_sampled(num_rows: int) -> Sampled:
    """The output of rows without a token."""
    return Sampled(
        jnp.full(num_rows, -1, jnp.int32),
        jnp.zeros(num_rows, F32),
        jnp.zeros((num_rows, NUM_ALTERNATIVES), jnp.int32),
        jnp.zeros((num_rows, NUM_ALTERNATIVES), F32),
    )


def best_token(logits: jax.Array) -> jax.Array:
    """Place of the largest of `[R, V]`, ties to the lower id -> int32 `[R]`. Two plain reductions: they vectorise."""
    places = jnp.arange(logits.shape[1], dtype=jnp.int32)
    is_best = logits == jnp.max(logits, 1, keepdims=True)
    return jnp.min(jnp.where(is_best, places, logits.shape[1]), 1)


def apply_penalties(logits: jax.Array, s: Sampling, counts: jax.Array, seen: jax.Array) -> jax.Array:
    """Repetition (prompt and generated tokens), then frequency and presence (generated tokens)."""
    occurred = (counts > 0) | (seen > 0)
    repetition = s.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurred, repeated, logits)
    return logits - s.frequency[:, None] * counts - s.presence[:, None] * (counts > 0)


def _apply_lists(logits: jax.Array, s: Sampling) -> jax.Array:
    """Logit bias and banned ids. Unused entries (-1) fall outside and are dropped."""
    rows = jnp.arange(logits.shape[0])[:, None]

    def inside(ids: jax.Array) -> jax.Array:
        return jnp.where(ids < 0, logits.shape[1], ids)

    logits = logits.at[rows, inside(s.bias_ids)].add(s.bias_values, mode="drop")
    return logits.at[rows, inside(s.banned)].set(-jnp.inf, mode="drop")


def apply_mask(logits: jax.Array, mask: jax.Array, masked: jax.Array) -> jax.Array:
    """`mask` uint32 `[R, ceil(V / 32)]`, a set bit allows; rows that are not `masked [R]` keep their logits."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]].astype(bool)
    return jnp.where(allowed | ~masked[:, None], logits, -jnp.inf)


def _order_keys(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order (the bits of negative numbers count backwards; both zeros are one)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(num_rows: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Largest key of each row for which `holds (keys [R]) -> bool [R]`, true below and false above; 0 if nowhere."""

    def one_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | jnp.uint32(1) << (31 - place).astype(jnp.uint32)
        return jnp.where(holds(tried), tried, found)

    return lax.fori_loop(0, 32, one_bit, jnp.zeros(num_rows, jnp.uint32))


def _among_best(scaled: jax.Array, s: Sampling) -> jax.Array:
    """Whether top-k, and then top-p over what top-k left, keep a logit: bool `[R, V]`; equal logits stay together.

    The least logit kept is found bit by bit, by counting and summing: 32 passes take a small part of the time of
    sorting a vocabulary.
    """
    num_rows, vocab = scaled.shape
    keys = _order_keys(scaled)

    def at_least(least: jax.Array) -> jax.Array:
        return keys >= least[:, None]

    k = jnp.where(s.top_k > vocab, vocab, s.top_k)
    kth = _largest_key(num_rows, lambda least: jnp.sum(at_least(least), 1) >= k)
    kth = jnp.where(k > 0, kth, 0)
    weights = jnp.where(at_least(kth), jnp.exp(scaled - jnp.max(scaled, 1, keepdims=True)), 0)
    wanted = s.top_p * jnp.sum(weights, 1)
    last = _largest_key(num_rows, lambda least: jnp.sum(jnp.where(at_least(least), weights, 0), 1) >= wanted)
    return at_least(jnp.where(s.top_p < 1, jnp.maximum(last, kth), kth))


def _filtered(scaled: jax.Array, s: Sampling) -> jax.Array:
    """top-k, top-p and min-p on logits over temperature; the best token always stays."""
    limited = (s.top_k > 0) | (s.top_p < 1)
    kept = lax.cond(
        jnp.any(limited & (s.temperature > 0)),
        lambda: _among_best(scaled, s),
        lambda: jnp.ones(scaled.shape, bool),
    )
    best = jnp.max(scaled, 1, keepdims=True)
    least = jnp.where(s.min_p[:, None] > 0, best + jnp.log(s.min_p)[:, None], -jnp.inf)
    return jnp.where(kept & (scaled >= least) | (scaled == best), scaled, -jnp.inf)


def _noise(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise `[V]` of one row: a function of the request's seed (two words) and the position."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab,), F32)


def _draw(logits: jax.Array, s: Sampling, position: jax.Array) -> jax.Array:
    """One token a row from the filtered distribution, by the Gumbel trick."""
    scaled = logits / jnp.where(s.temperature > 0, s.temperature, 1)[:, None]
    noise = jax.vmap(lambda seed, at: _noise(seed, at, logits.shape[1]))(s.seed, position)
    return best_token(_filtered(scaled, s) + noise)


def _log_probabilities(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    total = jax.nn.logsumexp(logits, 1, keepdims=True)
    values, ids = lax.top_k(logits, min(NUM_ALTERNATIVES, logits.shape[1]))
    short = NUM_ALTERNATIVES - ids.shape[1]
    ids = jnp.pad(ids, ((0, 0), (0, short)), constant_values=-1)
    own = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], 1) - total
    return own[:, 0], ids.astype(jnp.int32), jnp.pad(values - total, ((0, 0), (0, short)))


def sample(
    logits: jax.Array,
    s: Sampling,
    penalties: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array,
    masked: jax.Array,
    position: jax.Array,
    wants_logprobs: jax.Array,
) -> Sampled:
    """`logits [R, V]` float32 -> tokens.

    `penalties`: (generated counts `[N, V]`, prompt counts `[N, V]`, row of both for each row `[R]` (-1: none));
    `mask`, `masked`: see `apply_mask`; `position [R]` of the token being sampled; `wants_logprobs [R]` bool.
    """
    counts, seen, count_row = penalties
    has_lists = jnp.any(s.bias_ids >= 0) | jnp.any(s.banned >= 0)

    def penalised() -> jax.Array:
        used = (count_row >= 0)[:, None]
        row = jnp.maximum(count_row, 0)
        return apply_penalties(logits, s, jnp.where(used, counts[row], 0), jnp.where(used, seen[row], 0))

    def chosen() -> tuple[jax.Array, jax.Array]:
        processed = lax.cond(jnp.any(count_row >= 0), penalised, lambda: logits)
        processed = lax.cond(has_lists, lambda: _apply_lists(processed, s), lambda: processed)
        processed = lax.cond(jnp.any(masked), lambda: apply_mask(processed, mask, masked), lambda: processed)
        greedy = best_token(processed)
        draws = s.temperature > 0
        drawn = lax.cond(
            jnp.any(draws), lambda: jnp.where(draws, _draw(processed, s, position), greedy), lambda: greedy
        )
        return drawn, jnp.max(processed, 1)

    # One way past all of it, since every condition above hands on a copy of the logits.
    plain = ~(jnp.any(count_row >= 0) | has_lists | jnp.any(masked) | jnp.any(s.temperature > 0))
    drawn, best = lax.cond(plain, lambda: (best_token(logits), jnp.max(logits, 1)), chosen)
    # A maximum may step over a NaN, a sum does not.
    is_number = jnp.isfinite(best) & jnp.isfinite(jnp.sum(logits, 1))
    token = jnp.where(is_number, drawn, -1)
    nothing = nothing_sampled(logits.shape[0])
    return lax.cond(
        jnp.any(wants_logprobs),
        lambda: Sampled(token, *_log_probabilities(logits, token)),
        lambda: nothing._replace(token=token),
    )
