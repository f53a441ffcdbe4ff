"""What offline generation gives back."""

from dataclasses import dataclass

from rorqual.serve.text.text_stream import Finish, TextDelta, TextToken


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `num_cached`: prompt tokens that were not computed anew."""

    num_prompt: int
    num_generated: int
    num_cached: int


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of the model's own probability of a token, and of the best alternatives, best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. `finish_reason` is stop, length, abort or error; then `error` says what was wrong.

    `token_ids` are the tokens the text is made of; the EOS or stop token that ended it is counted in `usage` only.
    `logprobs` is None unless they were asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    usage: Usage
    error: str | None = None


@dataclass(frozen=True)
class CompletionDelta:
    """A piece of the answer to prompt `index`; `finish` comes with its last one."""

    index: int
    text: str
    tokens: tuple[TextToken, ...]
    finish: Finish | None


def refused(error: str, num_prompt: int = 0) -> Completion:
    """The answer to a prompt that was not run."""
    return Completion((), "", None, "error", Usage(num_prompt, 0, 0), error)


class Collector:
    """Puts the deltas of one prompt together."""

    def __init__(self, wants_logprobs: bool) -> None:
        self._texts: list[str] = []
        self._tokens: list[TextToken] = []
        self._finish: Finish | None = None
        self._wants_logprobs = wants_logprobs

    def add(self, delta: CompletionDelta | TextDelta) -> None:
        """Take the next delta."""
        self._texts.append(delta.text)
        self._tokens.extend(delta.tokens)
        self._finish = delta.finish or self._finish

    @property
    def completion(self) -> Completion:
        """The whole answer, once its last delta has come."""
        assert self._finish is not None
        finish = self._finish
        logprobs = None
        if self._wants_logprobs:
            logprobs = tuple(
                TokenLogprob(token.token_id, token.logprob, token.alternatives or ())
                for token in self._tokens
                if token.logprob is not None
            )
        return Completion(
            tuple(token.token_id for token in self._tokens),
            "".join(self._texts),
            logprobs,
            finish.reason,
            Usage(finish.num_prompt, finish.num_generated, finish.num_cached),
            finish.error,
        )
