"""What the scheduler knows of one running request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rorqual.serve.request import Request

# Window pages that a row of one new token at position t touches: those of positions t - page_size + 1 .. t,
# which are two at most. This many are promised to every running row, so it can always go on.
ROW_WINDOW_PAGES = 2


@dataclass(eq=False)
class Running:
    """A request between admission and finish.

    Steps run on the device in the order in which they are planned, so `num_planned`, not what has been
    committed, says where the row stands for everything that is planned next.
    """

    request: Request
    seat: int
    penalty_row: int  # -1: the request needs no counts
    feed: np.ndarray  # int32: tokens whose values the host brings; the others are in the seat
    max_new_tokens: int
    num_planned: int = 0  # positions below this one are computed, or will be by the steps planned so far
    num_in_flight: int = 0  # tokens sampled by planned steps that are not committed
    num_cached: int = 0  # tokens of the prompt that no step of this row computes
    generated: list[int] = field(default_factory=list)  # committed tokens, the ending one included
    pages: list[int] = field(default_factory=list)  # global pages by page index
    window: dict[int, int] = field(default_factory=dict)  # window pages by page index, ascending

    @property
    def num_to_feed(self) -> int:
        """Tokens that are still to be prefilled."""
        return max(0, len(self.feed) - self.num_planned)

    @property
    def decodes(self) -> bool:
        """True when the next step can carry this row with the token it sampled last.

        False once the planned steps sample the last token allowed: the row then only waits for its commit.
        """
        return not self.num_to_feed and len(self.generated) + self.num_in_flight < self.max_new_tokens

    def passed_window_pages(self, page_size: int) -> list[int]:
        """Page indices whose window page no token from position `num_planned` on looks back to."""
        first_needed = max(0, self.num_planned - page_size + 1) // page_size
        return [index for index in self.window if index < first_needed]


def num_positions(request: Request, max_context: int) -> int:
    """Positions the request computes at most: the token sampled last is never fed."""
    return len(request.prompt) + max(0, request.max_new_tokens(max_context) - 1)
