"""The tokenizer of a checkpoint: text to ids and ids to bytes, with control tokens kept out of reach of text.

A byte-level BPE tokenizer is a bijection between ids and byte strings plus an *added vocabulary* of control tokens.
`encode` works without the added vocabulary (spec/protocol section 1), so a text that spells a control token stays
plain text; control tokens enter a prompt only as ids, through `token_id`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

PIECE_CHARS = 1 << 17
"""Text is encoded in pieces of at least this many characters, so that a hopeless prompt is given up early."""

_SAFE_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
"""A space between two letters: every pre-tokenizer of this family ends a word there, whatever comes before or after."""


class TokenizerError(ValueError):
    """The tokenizer files of a checkpoint are missing or not of the byte-level BPE kind."""


class NotUnicode(ValueError):
    """A text holds a lone surrogate, which JSON can spell but no UTF-8 text has."""


class PromptTooLong(ValueError):
    """A prompt of at least `num_tokens` tokens where `allowed` are possible; found before it was encoded to its end."""

    def __init__(self, num_tokens: int, allowed: int, exact: bool = False) -> None:
        self.num_tokens = num_tokens
        self.allowed = allowed
        measured = f"{num_tokens}" if exact else f"at least {num_tokens}"
        super().__init__(f"{measured} tokens, allowed 1 to {allowed} tokens")


class Tokenizer:
    """Encoder, decoder and byte table of one `tokenizer.json`; safe to share between threads.

    Args:
        source: content of tokenizer.json.
        bos_id: id put before a plain prompt, None for none (`add_bos_token` of tokenizer_config.json).
    Raises:
        TokenizerError: the content is no tokenizer, or not byte-level.
    """

    def __init__(self, source: str, bos_id: int | None = None) -> None:
        try:
            description = json.loads(source)
            added = {token["content"]: token for token in description["added_tokens"]}
            decoder = description["decoder"]["type"]
            # Emptying the added vocabulary is stronger than the backend's own switch, which spares non-special tokens.
            self._plain = Backend.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
        except (ValueError, KeyError, TypeError) as error:
            raise TokenizerError(f"tokenizer.json: not a tokenizer description ({error})") from error
        except Exception as error:  # the backend raises plain Exception for a description it cannot build
            raise TokenizerError(f"tokenizer.json: {error}") from error
        if decoder != "ByteLevel":
            raise TokenizerError(f"tokenizer.json: decoder {decoder!r}, expected 'ByteLevel'")
        self.source = source
        self.bos_id = bos_id
        self._control = {spelling: int(token["id"]) for spelling, token in added.items()}
        self._silent = frozenset(int(token["id"]) for token in added.values() if token.get("special"))
        spellings = {token_id: spelling for spelling, token_id in self._plain.get_vocab().items()}
        spellings.update({token_id: spelling for spelling, token_id in self._control.items()})
        self._bytes = _byte_table(spellings)
        self.max_token_bytes = max((len(entry) for entry in self._bytes), default=1)

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json` of a checkpoint folder.

        Raises:
            TokenizerError: the file is missing or malformed; the message names it.
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from error
        tokenizer = cls(source)
        tokenizer.bos_id = _bos_of_plain_prompts(folder / "tokenizer_config.json", tokenizer)
        return tokenizer

    @property
    def num_tokens(self) -> int:
        """One more than the largest id."""
        return len(self._bytes)

    @property
    def silent_ids(self) -> frozenset[int]:
        """Ids marked special (begin, end, padding, ...): they carry no text in a completion."""
        return self._silent

    def token_id(self, spelling: str) -> int | None:
        """Id of a control token by its spelling, None when this tokenizer has no such control token."""
        return self._control.get(spelling)

    def least_tokens(self, num_bytes: int) -> int:
        """Fewest tokens that `num_bytes` bytes of text can make, from the longest token of the vocabulary."""
        return -(-num_bytes // self.max_token_bytes)

    def encode(self, text: str, allowed: int | None = None) -> list[int]:
        """Encode plain text; spellings of control tokens in it are plain text too. No BOS is added.

        Args:
            text: any text without lone surrogates.
            allowed: largest number of tokens wanted; encoding ends as soon as more are certain.
        Raises:
            PromptTooLong: more than `allowed` tokens.
            NotUnicode: the text holds a lone surrogate.
        """
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise NotUnicode(f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from error
        if allowed is not None and self.least_tokens(num_bytes) > allowed:
            raise PromptTooLong(self.least_tokens(num_bytes), allowed)
        ids: list[int] = []
        for piece in _pieces(text):
            # The batch form is the one that releases the interpreter lock.
            ids += self._plain.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            if allowed is not None and len(ids) > allowed:
                raise PromptTooLong(len(ids), allowed, exact=len(piece) == len(text))
        return ids

    def encode_prompt(self, text: str, allowed: int | None = None) -> list[int]:
        """`encode`, with the BOS id in front where the checkpoint asks for one and the text is not empty."""
        ids = self.encode(text, allowed)
        return [self.bos_id, *ids] if ids and self.bos_id is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token: UTF-8 or a part of it; the spelling for a control token; empty for an unused id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_label(self, token_id: int) -> str:
        """Readable, unambiguous form of one token: its text, or `bytes:` and escapes where it is no whole text."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, ids: Iterable[int], skip_silent: bool = True) -> str:
        """Text of ids taken together; an incomplete or invalid byte sequence becomes U+FFFD.

        Args:
            ids: token ids.
            skip_silent: leave out special tokens such as the end of the sentence.
        """
        kept = (i for i in ids if not (skip_silent and i in self._silent))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")


def _pieces(text: str) -> Iterator[str]:
    """Cut a text where the pre-tokenizer cuts anyway, so that the ids of the pieces are the ids of the whole."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        cut = _SAFE_CUT.search(text, start + PIECE_CHARS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    if start < len(text):
        yield text[start:]


def _byte_table(spellings: dict[int, str]) -> Sequence[bytes]:
    """Bytes of every id. Byte-level BPE writes each byte as one printable character; other spellings stand for
    themselves, as the backend's decoder has it."""
    alphabet = _byte_alphabet()
    table = [b""] * (max(spellings, default=-1) + 1)
    for token_id, spelling in spellings.items():
        try:
            table[token_id] = bytes([alphabet[char] for char in spelling])
        except KeyError:
            table[token_id] = spelling.encode("utf-8")
    return table


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


def _bos_of_plain_prompts(path: Path, tokenizer: Tokenizer) -> int | None:
    """BOS id when tokenizer_config.json sets add_bos_token, else None."""
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not config.get("add_bos_token"):
        return None
    spelled = config.get("bos_token")
    spelling = spelled.get("content") if isinstance(spelled, dict) else spelled
    bos_id = tokenizer.token_id(spelling) if isinstance(spelling, str) else None
    if bos_id is None:
        raise TokenizerError(f"{path}: add_bos_token is set, but bos_token {spelling!r} is no added token")
    return bos_id
