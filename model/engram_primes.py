"""Bucket counts of the Engram tables. Apart from the hash, so that reading a config needs no tokenizer."""

import numpy as np


def table_primes(num_layers: int, max_ngram: int, n_heads: int, at_least: int) -> np.ndarray:
    """Bucket counts int64 [num_layers, max_ngram - 1, n_heads]: per (layer, n-gram size, head) the smallest prime
    >= `at_least` not handed out before, in that order (spec section 8)."""
    wanted = num_layers * (max_ngram - 1) * n_heads
    # A segment of twice the expected length holds the primes wanted; it doubles until it does.
    length = max(64, int(2 * wanted * np.log(at_least + 2)))
    found = _primes_between(at_least, at_least + length)
    while len(found) < wanted:
        length *= 2
        found = _primes_between(at_least, at_least + length)
    return found[:wanted].reshape(num_layers, max_ngram - 1, n_heads)


def _primes_between(low: int, high: int) -> np.ndarray:
    """Primes in [low, high), by a sieve of the segment with every integer up to the root of `high`."""
    low = max(low, 2)
    is_prime = np.ones(high - low, bool)
    for divisor in range(2, int(high**0.5) + 1):
        first = max(divisor * divisor, -(-low // divisor) * divisor)
        is_prime[first - low :: divisor] = False
    return np.flatnonzero(is_prime).astype(np.int64) + low
