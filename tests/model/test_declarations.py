"""The declarations are the checkpoint: every name, shape and type, and the released byte count."""

import json
import math
import struct
from collections import Counter
from pathlib import Path

import pytest

from rorqual.model.config import read_config, released_config
from rorqual.model.declarations import PARTS, Weight, declare


@pytest.fixture(scope="module")
def released() -> dict[str, Weight]:
    return declare(released_config())


def test_released_count_and_bytes(released: dict[str, Weight]):
    assert len(released) == 96_085
    assert sum(weight.nbytes for weight in released.values()) == 510_286_023_000


def test_released_without_vision(released: dict[str, Weight]):
    rest = [weight for weight in released.values() if weight.part != "vision"]
    assert len(rest) == 95_819
    assert sum(weight.nbytes for weight in rest) == 509_315_486_040


def test_parts(released: dict[str, Weight]):
    parts = Counter(weight.part for weight in released.values())
    assert set(parts) == set(PARTS)
    for weight in released.values():
        assert (weight.part == "draft") == weight.name.startswith("mtp.")
        assert (weight.part == "engram") == (".engram." in weight.name)


def test_every_dim_has_an_axis(released: dict[str, Weight]):
    for name, weight in released.items():
        assert name == weight.name
        assert len(weight.axes) == len(weight.shape)
        assert min(weight.shape) > 0


def test_every_scale_belongs_to_a_weight(released: dict[str, Weight]):
    """FP8 tiles of 32x32 or rows of 32, FP4 rows of 32 in bytes of two; nothing else is quantised."""
    quantised = {name for name, weight in released.items() if weight.dtype in ("F8_E4M3", "I8")}
    scales = {name for name, weight in released.items() if weight.dtype == "F8_E8M0"}
    assert {name.removesuffix("scale") + "weight" for name in scales} == quantised
    for name in quantised:
        weight, scale = released[name], released[name.removesuffix("weight") + "scale"]
        rows, columns = weight.shape
        columns *= 2 if weight.dtype == "I8" else 1
        by_row = weight.dtype == "I8" or ".engram.embed." in name
        assert scale.shape == (rows if by_row else math.ceil(rows / 32), math.ceil(columns / 32))


def test_tiny_checkpoint_is_declared_exactly(tiny_dir: Path):
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in tiny_dir.glob("*.safetensors"):
        with shard.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        stored |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    declared = declare(read_config(tiny_dir))
    assert {weight.name: (weight.dtype, weight.shape) for weight in declared.values()} == stored
