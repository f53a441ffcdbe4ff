"""How a step's integers lie in the one array that travels to the device. Plain numbers: host and device both read it.

Per rank, one int32 vector: rows `[R, 4]`, host tokens `[T]`, page updates `[U, 4]`.
"""

from dataclasses import dataclass

SEAT, COUNT, START, FLAGS = range(4)
ROW_FIELDS = 4
UPDATE_FIELDS = 4  # seat, page index, global page, window page
FROM_SEAT = -1  # in START: position and token come from the seat
SAMPLES, MASKED = 1, 2  # in FLAGS


@dataclass(frozen=True)
class StepShape:
    """Static sizes of one step program: `num_tokens` T, `num_rows` R, and what fits beside them."""

    num_tokens: int
    num_rows: int
    page_size: int

    @property
    def num_updates(self) -> int:
        """Page updates: a row of c tokens reaches at most c // page_size + 1 new pages."""
        return self.num_rows + self.num_tokens // self.page_size

    @property
    def tokens_at(self) -> int:
        return self.num_rows * ROW_FIELDS

    @property
    def updates_at(self) -> int:
        return self.tokens_at + self.num_tokens

    @property
    def length(self) -> int:
        return self.updates_at + self.num_updates * UPDATE_FIELDS


FILL_SEATS = 4  # seats filled by one call of the fill program
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTEGERS = ("top_k", "seed_low", "seed_high", "min_tokens", "num_prompt", "wants_logprobs", "penalty_row")


@dataclass(frozen=True)
class FillShape:
    """Layout of one seat's parameters in a row of the fill array: seat, integers, stop ids, bias ids, floats (bits),
    bias values (bits)."""

    num_stop_ids: int
    num_bias: int

    @property
    def stop_at(self) -> int:
        return 1 + len(INTEGERS)

    @property
    def bias_at(self) -> int:
        return self.stop_at + self.num_stop_ids

    @property
    def floats_at(self) -> int:
        return self.bias_at + self.num_bias

    @property
    def values_at(self) -> int:
        return self.floats_at + len(FLOATS)

    @property
    def length(self) -> int:
        return self.values_at + self.num_bias
