"""Host side of Engram: which table rows a position reads (spec section 8). numpy, 64-bit integers, no jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from rorqual.model.engram_primes import table_primes

if TYPE_CHECKING:
    from rorqual.model.config import ModelConfig

_SEED_STEP = 10007
_UNDECODABLE = "\ufffd"
_LONE_SPACE = "\ue000"  # stands for a text that is one space while the ends are stripped


class EngramError(ValueError):
    """The tokenizer does not make the compressed vocabulary that the config promises. Names both counts."""


@dataclass(frozen=True, eq=False)
class EngramHash:
    """Constants of the row hash. `layers` below counts Engram layers, in the order of the config.

    token_map: int32 [vocab], compressed id of every token id
    pad: compressed id that stands for what a lookback does not reach
    multipliers: int64 [layers, max_ngram], by lookback
    primes: int64 [layers, max_ngram - 1, heads], bucket counts
    offsets: int64 [layers, max_ngram - 1, heads], first row of each bucket range in the layer's table
    """

    token_map: np.ndarray
    pad: int
    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    def lookback_ids(self, token_ids: np.ndarray, image_mask: np.ndarray | None = None) -> np.ndarray:
        """Compressed ids int64 [T, max_ngram] of the tokens 0, 1, ... positions back, for token_ids int [T].

        A lookback ends at the start of the sequence and at an image token (image_mask bool [T]), its own included: from
        there on it reads `pad`.
        """
        tokens = np.asarray(token_ids)
        reached = np.ones(len(tokens), bool)
        text = np.ones(len(tokens), bool) if image_mask is None else ~np.asarray(image_mask, bool)
        compressed = self.token_map[np.where(text, tokens, 0)].astype(np.int64)
        result = np.full((len(tokens), self.multipliers.shape[1]), self.pad, np.int64)
        for back in range(min(len(tokens), result.shape[1])):
            reached[:back] = False
            reached[back:] &= text[: len(tokens) - back]
            here = np.flatnonzero(reached)
            result[here, back] = compressed[here - back]
        return result

    def ngram_rows(self, token_ids: np.ndarray, image_mask: np.ndarray | None = None) -> np.ndarray:
        """Table rows int64 [T, layers, (max_ngram - 1) * heads]; columns by n-gram size, then head.

        token_ids int [T] from the start of the sequence; image_mask bool [T], None = text only.
        """
        ids = self.lookback_ids(token_ids, image_mask)
        products = ids[:, None, :] * self.multipliers
        # After the running XOR, entry n - 1 mixes the lookbacks 0..n-1 of an n-gram.
        mixed = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
        rows = mixed[..., None] % self.primes + self.offsets
        return rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3])


def engram_hash(config: "ModelConfig", token_map: np.ndarray) -> EngramHash:
    """Hash constants of a config with the compressed map of its tokenizer (int32 [vocab], see `compressed_map`).

    Raises EngramError when the map covers another vocabulary or has another number of compressed ids than the config.
    """
    engram = config.engram
    if len(token_map) != config.vocab_size:
        raise EngramError(f"tokenizer: found {len(token_map)} ids, expected vocab_size {config.vocab_size}")
    found = int(token_map.max()) + 1
    if found != engram.compressed_vocab_size:
        expected = f"engram_compressed_vocab_size {engram.compressed_vocab_size}"
        raise EngramError(f"tokenizer: found {found} compressed ids, expected {expected}")
    primes = table_primes(len(engram.layers), engram.max_ngram, engram.n_heads, engram.vocab_size)
    sizes = primes.reshape(len(engram.layers), engram.n_columns)
    offsets = (np.cumsum(sizes, axis=1) - sizes).reshape(primes.shape)
    multipliers = [_multipliers(layer, engram.max_ngram, found) for layer in engram.layers]
    return EngramHash(
        token_map=token_map,
        pad=int(token_map[engram.pad_id]),
        multipliers=np.array(multipliers, np.int64).reshape(len(engram.layers), engram.max_ngram),
        primes=primes,
        offsets=offsets,
    )


def compressed_map(tokenizer_file: str | Path) -> np.ndarray:
    """int32 [number of ids]: for every id of a tokenizer.json the number of its normalised text, as they appear.

    Tokens whose text is alike but for case, accents and white space share a number; a token that is no whole text by
    itself (bytes of a character) goes by its own spelling. About a second for 129,280 ids (spec section 8).
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    num_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(num_ids)], skip_special_tokens=False)
    normalise = _normaliser().normalize_str
    numbers: dict[str | None, int] = {}
    compressed = np.empty(num_ids, np.int32)
    for token, text in enumerate(texts):
        if _UNDECODABLE in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalise(text) or text
        compressed[token] = numbers.setdefault(key, len(numbers))
    return compressed


def _normaliser() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \\t\\r\\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _multipliers(layer: int, max_ngram: int, compressed_vocab_size: int) -> np.ndarray:
    """Odd int64 [max_ngram], small enough that a compressed id times a multiplier stays below 2^63."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    return np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1
