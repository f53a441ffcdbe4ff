"""Incremental detokenizer: token bytes in, whole characters out."""

import codecs


class Detokenizer:
    """Joins the bytes of tokens and gives out text as soon as it is whole characters; constant work per byte.

    The concatenation of everything `feed` and `flush` return equals decoding all bytes at once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_bytes: bytes) -> str:
        """Text completed by these bytes; an unfinished character is held back."""
        return self._decoder.decode(token_bytes)

    def flush(self) -> str:
        """Give out held bytes, as U+FFFD, at the end of the text."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def num_held_bytes(self) -> int:
        """Bytes of an unfinished character."""
        return len(self._decoder.getstate()[0])
