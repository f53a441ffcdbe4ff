"""From honoured body fields to prompts and sampling parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from rorqual.serve.api.errors import ApiError
from rorqual.serve.api.fields import json_type
from rorqual.serve.limits import Limits
from rorqual.serve.request import SamplingParams

COPIED = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
)

MAX_CHECKED_CHARS = 4096
"""Of a stop string; longer ones are refused for their length."""

Prompt = str | list[int]


def check_model(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Name of the model to answer as: the one asked for, or the first served where none is named."""
    asked = values.get("model", names[0])
    if asked not in names:
        shown = repr(asked[:100])
        raise ApiError(400, f"model: {shown}, allowed {' or '.join(map(repr, names))}", "model", "model_not_found")
    return str(asked)


def sampling_params(
    values: Mapping[str, Any], defaults: Mapping[str, float], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Sampling parameters: stated values first, then the checkpoint's defaults, then the engine's.

    Only the form of containers is settled here; ranges are the engine's check.
    """
    chosen: dict[str, Any] = {**defaults, **{name: values[name] for name in COPIED if name in values}}
    if "top_k" in values:
        # Clients of other engines write -1 for "off".
        chosen["top_k"] = 0 if values["top_k"] == -1 else values["top_k"]
    stated = values.get("stop", [])
    stop = (stated,) if isinstance(stated, str) else tuple(stated)
    if any("\ud800" <= char <= "\udfff" for text in stop for char in text[:MAX_CHECKED_CHARS]):
        raise ApiError.bad_value("stop", "a lone surrogate", "Unicode text")
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(values.get("stop_token_ids", ())),
        logit_bias=_logit_bias(values.get("logit_bias", {})),
    )


def _logit_bias(mapping: Mapping[str, Any]) -> tuple[tuple[int, Any], ...]:
    pairs = []
    for key, value in mapping.items():
        digits = key[1:] if key.startswith("-") else key
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 20:
            raise ApiError.bad_value("logit_bias", f"the key {key[:40]!r}", "token ids as keys")
        pairs.append((int(key), value))
    return tuple(pairs)


def with_usage(values: Mapping[str, Any]) -> bool:
    """True when the stream shall end with a usage chunk.

    Raises:
        ApiError: stream_options without streaming, or a wrong value in it.
    """
    options = values.get("stream_options")
    if options is None:
        return False
    if not values.get("stream", False):
        raise ApiError(400, "stream_options: given without stream, allowed only with stream true", "stream_options")
    for name, value in options.items():
        if name in ("include_usage", "continuous_usage_stats") and not isinstance(value, bool | None):
            raise ApiError(400, f"stream_options.{name}: not a boolean, allowed true or false", "stream_options")
    if options.get("continuous_usage_stats"):
        message = "stream_options.continuous_usage_stats: true, allowed false (not supported)"
        raise ApiError(400, message, "stream_options")
    return bool(options.get("include_usage"))


def completion_prompts(value: Any, max_prompts: int) -> list[Prompt]:
    """The prompts of a completions request: one text, several texts, one list of ids or several such lists.

    Raises:
        ApiError: none of the four forms, an empty list or text, or more than `max_prompts`.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else "missing" if value is None else json_type(value)
        raise ApiError.bad_value("prompt", found, "a text or a list of 1 element and more")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    if kinds not in ({str}, {list}):
        names = sorted({json_type(item) for item in value})
        allowed = "a list of only texts, only token ids or only lists of ids"
        raise ApiError.bad_value("prompt", f"a list with {' and '.join(names)} in it", allowed)
    if len(value) > max_prompts:
        raise ApiError.bad_value("prompt", f"{len(value)} prompts", f"1 to {max_prompts} prompts")
    for item in value:
        if not item:
            found = "an empty text" if item == "" else "an empty list of token ids"
            raise ApiError.bad_value("prompt", f"{found} (0 tokens)", "prompts of 1 token and more")
    return value


def top_logprobs(values: Mapping[str, Any], limits: Limits) -> int | None:
    """Number of alternatives a chat request asks for, None for no log-probabilities.

    Raises:
        ApiError: alternatives without log-probabilities, or more than the limit.
    """
    asked = values.get("top_logprobs", 0)
    if not 0 <= asked <= limits.max_logprobs:
        raise ApiError.bad_value("top_logprobs", str(asked)[:40], f"0 to {limits.max_logprobs}")
    if not values.get("logprobs", False):
        if asked:
            raise ApiError(400, f"top_logprobs: {asked} without logprobs, allowed with logprobs true", "top_logprobs")
        return None
    return int(asked)


def stated_max_tokens(values: Mapping[str, Any]) -> tuple[str, int | None]:
    """The field in which a request states its answer length, and the length.

    Raises:
        ApiError: two fields that disagree.
    """
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        message = f"max_completion_tokens: {str(new)[:40]}, allowed the same as max_tokens ({str(old)[:40]})"
        raise ApiError(400, message, "max_completion_tokens")
    return ("max_completion_tokens", new) if old is None and new is not None else ("max_tokens", old)
