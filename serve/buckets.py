"""The one table of step sizes: which shapes the step is compiled for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ROUNDING = 16  # every size is a multiple of this many tokens
FIRST_SIZE = 16
GROWTH = 4


@dataclass(frozen=True)
class Buckets:
    """Step sizes T in tokens, ascending. The number of rows follows from T; context length is no shape."""

    token_sizes: tuple[int, ...]
    max_rows: int

    def __post_init__(self) -> None:
        sizes = self.token_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(f"token_sizes: {sizes}, allowed positive sizes in ascending order")
        if self.max_rows < 1:
            raise ValueError(f"max_rows: {self.max_rows}, allowed at least 1")

    def rows(self, num_tokens: int) -> int:
        """Rows of the step of size `num_tokens`: each row brings at least one token."""
        return min(num_tokens, self.max_rows)

    def fit(self, num_tokens: int) -> int:
        """Smallest size T >= `num_tokens`; ValueError beyond the largest or below one token."""
        if not 1 <= num_tokens <= self.token_sizes[-1]:
            raise ValueError(f"num_tokens: {num_tokens}, allowed 1..{self.token_sizes[-1]}")
        return self.token_sizes[bisect_left(self.token_sizes, num_tokens)]


def bucket_table(max_step_tokens: int, max_rows: int) -> Buckets:
    """Sizes 16, 64, 256, 1024, ... up to `max_step_tokens` (rounded up to 16), which is the last one.

    `max_rows`, rounded up likewise, is a size of its own: it is the steady decode step of a full engine.
    ValueError when the rows do not fit the tokens.
    """
    if not 1 <= max_rows <= max_step_tokens:
        raise ValueError(f"max_rows: {max_rows}, allowed 1..max_step_tokens = {max_step_tokens}")
    last = _round_up(max_step_tokens)
    sizes = {last, _round_up(max_rows)}
    size = FIRST_SIZE
    while size < last:
        sizes.add(size)
        size *= GROWTH
    return Buckets(tuple(sorted(sizes)), max_rows)


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // ROUNDING) * ROUNDING
