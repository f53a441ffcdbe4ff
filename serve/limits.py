"""What one engine accepts: its sizes, and the allowed range of every sampling number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Below this temperature a request counts as greedy: the next best token of a bf16 logit row then has a
# probability under e**-100, while the division by the temperature could overflow float32.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Limits:
    """Sizes of a running engine that decide which requests it accepts (all counts, no bytes).

    `image_token_id` is the placeholder that may not stand in a plain prompt; None: no such token.
    Raises ValueError naming the size when two of them contradict each other.
    """

    vocab_size: int
    max_context: int  # prompt and generated tokens of one request together
    max_rows: int  # rows of one step, and seats
    max_step_tokens: int  # tokens of one step, all rows together
    page_size: int  # token positions of a page: the model's sliding window
    max_logprobs: int = 20
    max_logit_bias: int = 300
    max_stop_strings: int = 16
    max_stop_token_ids: int = 16
    max_stop_chars: int = 1024  # length of one stop string
    image_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_context", "max_rows", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, allowed at least 1")
        if self.page_size < 2 or self.page_size % 2:
            raise ValueError(f"page_size: {self.page_size}, allowed an even number from 2")
        if self.max_step_tokens < self.max_rows:  # every decode row rides in every step
            raise ValueError(f"max_step_tokens: {self.max_step_tokens}, allowed at least max_rows = {self.max_rows}")


@dataclass(frozen=True)
class Range:
    """Allowed values of one number: `low..high`, both ends included; `note` says what the ends mean."""

    kind: type[int] | type[float]
    low: float
    high: float
    note: str = ""
    low_open: bool = False  # True: `low` itself is not allowed

    def contains(self, value: float) -> bool:
        """True when `value` (a number, NaN and infinity included) is allowed."""
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    @property
    def allowed(self) -> str:
        """The range in words, for errors and documentation."""
        ends = f"above {self.low} up to {self.high}" if self.low_open else f"{self.low}..{self.high}"
        return f"{'an integer' if self.kind is int else 'a number'} {ends}"


@lru_cache(maxsize=16)
def sampling_ranges(limits: Limits) -> dict[str, Range]:
    """Range of every numeric field of SamplingParams, and of the numbers inside its lists.

    This table is the single source: `check_request` enforces it and documentation quotes it.
    `max_tokens` is given for a prompt of one token; it shrinks by one for each further prompt token.
    """
    top_id = limits.vocab_size - 1
    return {
        "max_tokens": Range(int, 1, limits.max_context - 1, "None: up to the context"),
        "min_tokens": Range(int, 0, limits.max_context - 1, "no more than max_tokens"),
        "temperature": Range(float, 0.0, 100.0, f"below {GREEDY_BELOW}: greedy"),
        "top_p": Range(float, 0.0, 1.0, "1: off", low_open=True),
        "top_k": Range(int, 0, 2**31 - 1, "0, or the vocabulary size and above: off"),
        "min_p": Range(float, 0.0, 1.0, "0: off"),
        "presence_penalty": Range(float, -2.0, 2.0, "0: off"),
        "frequency_penalty": Range(float, -2.0, 2.0, "0: off"),
        "repetition_penalty": Range(float, 0.01, 10.0, "1: off"),
        "seed": Range(int, 0, 2**63 - 1, "None: drawn by the engine"),
        "logprobs": Range(int, 0, limits.max_logprobs, "number of alternatives; None: no logprobs"),
        "logit_bias id": Range(int, 0, top_id),
        "logit_bias value": Range(float, -100.0, 100.0),
        "stop_token_ids id": Range(int, 0, top_id),
    }
