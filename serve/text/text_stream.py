"""From engine events to text: detokenizing, stop strings and the finish reason of one plain completion."""

from collections.abc import Sequence
from typing import NamedTuple

from rorqual.serve.request import Finished, SamplingParams, Token
from rorqual.serve.text.detokenize import Detokenizer
from rorqual.serve.text.stop import StopMatcher
from rorqual.serve.text.tokenizer import Tokenizer


class TextToken(NamedTuple):
    """One generated token: its id, where its text starts in the whole text (characters), and its log-probabilities."""

    token_id: int
    offset: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...] | None


class Finish(NamedTuple):
    """How a generation ended.

    `reason` is one of stop, length, abort, error; `matched` the stop string or stop token id, or None;
    `error` the engine's message; counts are in tokens, `num_generated` up to the token that ended the text.
    """

    reason: str
    matched: str | int | None
    error: str | None
    num_prompt: int
    num_generated: int
    num_cached: int


class TextDelta(NamedTuple):
    """What some events add: text that stands, the tokens they brought, and the end if it is reached.

    `cut` is True once, when a stop string was found: the caller then tells the engine to finish the request as "stop";
    tokens that still arrive are dropped, and `finish` comes with the engine's own Finished event.
    """

    text: str
    tokens: tuple[TextToken, ...]
    cut: bool
    finish: Finish | None


class TextStream:
    """Text side of one request. Feed it the events in order; it holds text back only while a stop string or a
    character may still be completed, and its deltas do not depend on how the events are grouped.

    Special tokens give no text (the EOS or stop token that ends a request does not even arrive as an event). The token
    that completes a stop string is the last one counted and reported; `min_tokens` does not hold stop strings off.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer()
        self._matcher = StopMatcher(params.stop)
        self._offset = 0
        self.num_generated = 0

    def feed(self, events: Sequence[Token | Finished]) -> TextDelta:
        """Take events of this request in order and return what they add to the answer."""
        already_cut = self._matcher.matched is not None
        pieces: list[str] = []
        tokens: list[TextToken] = []
        finish: Finish | None = None
        for event in events:
            if isinstance(event, Finished):
                pieces.append(self._end())
                finish = self._finish(event)
                break
            if self._matcher.matched is None:
                tokens.append(TextToken(event.token, self._offset, event.logprob, event.alternatives))
                pieces.append(self._token(event.token))
        cut = self._matcher.matched is not None and not already_cut
        return TextDelta("".join(pieces), tuple(tokens), cut and finish is None, finish)

    def _token(self, token_id: int) -> str:
        self.num_generated += 1
        if token_id in self._tokenizer.silent_ids:
            return ""
        text = self._detokenizer.feed(self._tokenizer.token_bytes(token_id))
        self._offset += len(text)
        return self._matcher.feed(text)

    def _end(self) -> str:
        if self._matcher.matched is not None:
            return ""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()

    def _finish(self, event: Finished) -> Finish:
        matched: str | int | None = self._matcher.matched
        if matched is not None:
            return Finish("stop", matched, None, event.num_prompt, self.num_generated, event.num_cached)
        error = str(event.detail) if event.reason == "error" else None
        matched = event.detail if event.reason == "stop" else None
        return Finish(event.reason, matched, error, event.num_prompt, event.num_generated, event.num_cached)
