"""Log-probabilities as the two OpenAI response formats have them: per chat token, and in columns for completions."""

from collections.abc import Sequence
from typing import Any

from rorqual.serve.text.text_stream import TextToken
from rorqual.serve.text.tokenizer import Tokenizer

NO_CHANCE = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot write."""


def finite(logprob: float | None) -> float:
    """A number that JSON can write: minus infinity (a banned token) and NaN become NO_CHANCE."""
    return float(logprob) if logprob is not None and logprob >= NO_CHANCE else NO_CHANCE


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, list[Any]]:
    """Columns `tokens`, `token_logprobs`, `top_logprobs` and `text_offset` (characters into the returned text).

    Tokens that are no whole text are written as `bytes:` and escapes, so that the columns lose nothing.
    """
    return {
        "tokens": [tokenizer.token_label(token.token_id) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {tokenizer.token_label(i): finite(logprob) for i, logprob in token.alternatives or ()} for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprob(
    tokenizer: Tokenizer, token_id: int, logprob: float | None, alternatives: Sequence[tuple[int, float]] | None
) -> dict[str, Any]:
    """One entry of a chat answer's `logprobs.content`: token, logprob, bytes and alternatives of the same form."""
    entry = _entry(tokenizer, token_id, logprob)
    entry["top_logprobs"] = [_entry(tokenizer, i, value) for i, value in alternatives or ()]
    return entry


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "".join(chr(byte) if byte < 0x80 else f"\\x{byte:02x}" for byte in data)
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
