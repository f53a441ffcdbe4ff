"""A request: its parameters, the gate that checks them, and the events that a client hears of it.

Everything that can be wrong with a request is found here, on the host, before the engine sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rorqual.serve.limits import GREEDY_BELOW, Limits, Range, sampling_ranges

SHOWN_CHARS = 60  # of a wrong value: an error never repeats a long input
PLAIN_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(Protocol):
    """A grammar: says which tokens may come next."""

    def mask(self, generated: Sequence[int]) -> np.ndarray:
        """uint32 [ceil(vocab_size / 32)]; bit i % 32 of word i // 32 set: token i may follow `generated`."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop; ranges: `limits.sampling_ranges`, enforced by `check_request`.

    Lists may be given where a tuple stands, a mapping for `logit_bias` and one string for `stop`.
    """

    max_tokens: int | None = None  # None: up to the context
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: drawn by the engine
    logprobs: int | None = None  # number of alternatives beside each token; None: no logprobs at all
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # EOS and stop tokens are banned among the first min_tokens generated ones
    ignore_eos: bool = False  # EOS is a token like any other; stop_token_ids still stop
    constraint: Constraint | None = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("logit_bias", "stop", "stop_token_ids"):
            object.__setattr__(self, name, _one_form(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """True when the best token is taken without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def uses_penalties(self) -> bool:
        """True when the request needs counts of the tokens it has seen."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _one_form(value: Any) -> Any:
    """Lists, mappings and a lone string as tuples; what is in them is left to check_request."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


class Token(NamedTuple):
    """One generated token that the client is to see."""

    id: int
    token: int
    logprob: float | None = None  # natural logarithm
    alternatives: tuple[tuple[int, float], ...] | None = None  # (token, logprob), best first


class Finished(NamedTuple):
    """The last event of a request.

    `num_generated` counts every sampled token up to and including the EOS or stop token that ended the
    request, though that token has no Token event. For reason "stop", `detail` is the id out of stop_token_ids
    that matched and None for EOS; for "error" it is the error's text.
    """

    id: int
    reason: FinishReason
    num_prompt: int
    num_generated: int
    num_cached: int  # prompt tokens that were not computed anew
    detail: str | int | None = None


Event = Token | Finished


def drop_events(events: list[Event]) -> None:
    """The sink of a request that nobody listens to."""


@dataclass(eq=False)
class Request:
    """A checked request. Two requests are the same only if they are the same object.

    `prompt` is int32 [length], as `check_request` returned it. A score request wants the logits of every
    prompt position and generates nothing. `sink` is called on the engine thread and must not block.
    """

    id: int
    prompt: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()
    score: bool = False
    sink: Callable[[list[Event]], None] = drop_events

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the request: the ones to ban while fewer than min_tokens are generated."""
        eos_ids = () if self.params.ignore_eos else self.eos_ids
        return frozenset(self.params.stop_token_ids).union(eos_ids)

    def max_new_tokens(self, max_context: int) -> int:
        """Tokens the request may generate at most, in a context of `max_context` tokens."""
        if self.score:
            return 0
        room = max_context - len(self.prompt)
        return room if self.params.max_tokens is None else min(room, self.params.max_tokens)


class RequestError(ValueError):
    """A request that is refused: "<field>: <found>, allowed <range>"."""

    def __init__(self, field: str, found: str, allowed: str) -> None:
        super().__init__(f"{field}: {found}, allowed {allowed}")
        self.field = field


def check_request(
    prompt_ids: Sequence[int] | np.ndarray, params: SamplingParams, limits: Limits, score: bool = False
) -> np.ndarray:
    """Checks a request against the limits; returns its prompt as int32 [length], a copy.

    The prompt must leave room for one generated token, unless it is only to be scored. The length is judged
    first, so an oversized prompt costs nothing. Raises RequestError; its `field` is "prompt" or the name of the
    field of SamplingParams.
    """
    prompt = check_prompt(prompt_ids, limits, score)
    if not isinstance(params, SamplingParams):
        raise RequestError("params", _show(params), "SamplingParams")
    ranges = sampling_ranges(limits)
    for name in PLAIN_NUMBERS:
        _check_number(name, getattr(params, name), ranges[name])
    for name in ("seed", "logprobs"):
        if getattr(params, name) is not None:
            _check_number(name, getattr(params, name), ranges[name])
    _check_lengths(params, limits, len(prompt), score)
    _check_logit_bias(params.logit_bias, limits)
    _check_stops(params, limits)
    if not isinstance(params.ignore_eos, bool):
        raise RequestError("ignore_eos", _show(params.ignore_eos), "true or false")
    if params.constraint is not None and not callable(getattr(params.constraint, "mask", None)):
        raise RequestError("constraint", _show(params.constraint), "an object with a mask method, or None")
    return prompt


def check_prompt(prompt_ids: Any, limits: Limits, score: bool = False) -> np.ndarray:
    """The part of `check_request` that looks at the prompt alone; same result and errors."""
    if not isinstance(prompt_ids, list | tuple | np.ndarray) or getattr(prompt_ids, "ndim", 1) != 1:
        raise RequestError("prompt", _show(prompt_ids), "a list of token ids")
    longest = limits.max_context if score else limits.max_context - 1
    if not 1 <= len(prompt_ids) <= longest:
        room = "" if score else f", so that one of {limits.max_context} positions is left to generate"
        raise RequestError("prompt", f"{len(prompt_ids)} tokens", f"1..{longest} tokens{room}")
    _check_token_types(prompt_ids)
    # The ends of the input itself: an id of any size is compared before it is narrowed to 32 bits.
    least, most = (np.min, np.max) if isinstance(prompt_ids, np.ndarray) else (min, max)
    for found in (least(prompt_ids), most(prompt_ids)):
        if not 0 <= found < limits.vocab_size:
            raise RequestError("prompt", f"token id {_show(int(found))}", f"0..{limits.vocab_size - 1}")
    prompt = np.array(prompt_ids, np.int32)
    if limits.image_token_id is not None and (prompt == limits.image_token_id).any():
        found = f"token id {limits.image_token_id} at position {int(np.argmax(prompt == limits.image_token_id))}"
        raise RequestError("prompt", found, "any id but the image placeholder, which stands for image rows")
    return prompt


def _check_token_types(prompt_ids: Sequence[int] | np.ndarray) -> None:
    kinds = {prompt_ids.dtype.type} if isinstance(prompt_ids, np.ndarray) else set(map(type, prompt_ids))
    for kind in kinds:
        # bool is an int to Python, and numpy would take True for 1
        if not issubclass(kind, int | np.integer) or issubclass(kind, bool):
            raise RequestError("prompt", f"an element of type {kind.__name__}", "integer token ids")


def _check_number(field: str, value: Any, allowed: Range) -> None:
    fits = isinstance(value, Integral if allowed.kind is int else Real) and not isinstance(value, bool)
    if not fits or not allowed.contains(value):
        raise RequestError(field.split()[0], _show(value), allowed.allowed)


def _check_lengths(params: SamplingParams, limits: Limits, num_prompt: int, score: bool) -> None:
    room = limits.max_context - num_prompt
    wanted: Any = params.max_tokens
    if wanted is not None and not score:
        is_integer = isinstance(wanted, Integral) and not isinstance(wanted, bool)
        if not is_integer or not 1 <= wanted <= room:
            allowed = f"an integer 1..{room}: the context of {limits.max_context} less the prompt of {num_prompt}"
            raise RequestError("max_tokens", _show(wanted), allowed)
    most = room if params.max_tokens is None or score else params.max_tokens
    _check_number("min_tokens", params.min_tokens, Range(int, 0, most))


def _check_logit_bias(pairs: Any, limits: Limits) -> None:
    field, ranges = "logit_bias", sampling_ranges(limits)
    if not isinstance(pairs, tuple):
        raise RequestError(field, _show(pairs), "a mapping of token ids to values")
    if len(pairs) > limits.max_logit_bias:
        raise RequestError(field, f"{len(pairs)} entries", f"at most {limits.max_logit_bias}")
    seen: set[int] = set()
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(field, _show(pair), "pairs of a token id and a value")
        _check_number("logit_bias id", pair[0], ranges["logit_bias id"])
        _check_number("logit_bias value", pair[1], ranges["logit_bias value"])
        if pair[0] in seen:
            raise RequestError(field, f"token id {pair[0]} twice", "each id once")
        seen.add(pair[0])


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    for name, most in (("stop", limits.max_stop_strings), ("stop_token_ids", limits.max_stop_token_ids)):
        items = getattr(params, name)
        if not isinstance(items, tuple):
            raise RequestError(name, _show(items), "a list")
        if len(items) > most:
            raise RequestError(name, f"{len(items)} entries", f"at most {most}")
    for text in params.stop:
        if not isinstance(text, str):
            raise RequestError("stop", _show(text), "strings")
        if not 1 <= len(text) <= limits.max_stop_chars:
            raise RequestError("stop", f"a string of {len(text)} characters", f"1..{limits.max_stop_chars}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError("stop", f"{text[:SHOWN_CHARS]!a}, a lone surrogate", "text")
    for token in params.stop_token_ids:
        _check_number("stop_token_ids id", token, sampling_ranges(limits)["stop_token_ids id"])


def _show(value: Any) -> str:
    """A wrong value in a few characters, whatever it is."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple | dict | set) or (isinstance(value, str | bytes) and len(value) > SHOWN_CHARS):
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print the very long ones
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
