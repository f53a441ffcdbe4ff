"""Loading: whatever the storage and the stacking, the arrays hold the numbers of the checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from rorqual.model.checkpoint import CheckpointError
from rorqual.model.config import ModelConfig, read_config
from rorqual.model.engram_hash import EngramError
from rorqual.model.forward import Params
from rorqual.model.leaves import Leaf, Storage, Tree, all_leaves
from rorqual.model.load import abstract_params, leaf_tree, load_params
from rorqual.model.number_formats import dequantise_fp4_rows, dequantise_fp8_tiles

STORAGES: list[Storage] = ["packed", "bfloat16", "float32"]


@pytest.fixture(scope="module")
def config(tiny_dir: Path) -> ModelConfig:
    return read_config(tiny_dir)


@pytest.fixture(scope="module")
def stored(tiny_dir: Path) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint as raw bits, read by plain means."""
    tensors = {}
    for path in sorted(tiny_dir.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                kind = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}.get(entry["dtype"], np.uint8)
                tensors[name] = np.frombuffer(raw[start + low : start + high], kind).reshape(entry["shape"])
    return tensors


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path, config: ModelConfig) -> Callable[[Storage, bool], tuple[Tree, Params]]:
    """Plan and parameters by storage and form (unrolled or not), each loaded once."""
    known: dict[tuple[Storage, bool], tuple[Tree, Params]] = {}

    def load(storage: Storage, unrolled: bool) -> tuple[Tree, Params]:
        if (storage, unrolled) not in known:
            tree = leaf_tree(config, storage, unrolled)
            known[storage, unrolled] = tree, load_params(tiny_dir, config, tree, progress=False)
        return known[storage, unrolled]

    return load


def in_order(tree: Any, leaf_type: type) -> list:
    """Leaves in the order of the plan (jax sorts the keys of a dict)."""
    if isinstance(tree, leaf_type):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [leaf for value in values for leaf in in_order(value, leaf_type)]


def by_tensor(plan: tuple[Tree, Params]) -> dict[str, np.ndarray]:
    """Every tensor's part of its leaf, by checkpoint name."""
    tree, params = plan
    found = {}
    arrays = in_order(
        {key: params[key] for key in tree if key != "engram"} | {"engram": params["engram"]["layers"]}, jax.Array
    )
    for leaf, array in zip(all_leaves(tree), arrays, strict=True):
        parts = np.asarray(array).reshape(-1, *leaf.shape)
        assert array.shape == leaf.full_shape and array.dtype == leaf.dtype and array.nbytes == leaf.nbytes
        for name, part in zip(leaf.names, parts, strict=True):
            found[name] = part
    return found


def expected(name: str, leaf: Leaf, stored: dict[str, np.ndarray]) -> np.ndarray:
    """What a leaf must hold of a tensor, by the decoders of number_formats."""
    if leaf.form == "stored":
        return stored[name].astype(leaf.dtype)
    decode = dequantise_fp8_tiles if leaf.form == "fp8" else dequantise_fp4_rows
    wide = decode(stored[name], stored[name.removesuffix("weight") + "scale"], np.dtype(np.float32))
    if leaf.dtype == "float32":
        return wide
    narrow = wide.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(narrow.astype(np.float32), wide, err_msg="not a bf16 number")
    return narrow.view(np.uint16) if leaf.dtype == "uint16" else narrow


@pytest.mark.parametrize("storage", STORAGES)
def test_every_leaf_holds_its_tensors(loaded: Callable, stored: dict[str, np.ndarray], storage: Storage):
    """Bit for bit; decoding to bfloat16 loses nothing."""
    tree, _ = loaded(storage, True)
    leaf_of = {name: leaf for leaf in all_leaves(tree) for name in leaf.names}
    found = by_tensor(loaded(storage, True))
    assert set(found) == set(leaf_of)
    for name, part in found.items():
        wanted = expected(name, leaf_of[name], stored)
        assert part.shape == wanted.shape
        assert part.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("storage", STORAGES)
def test_scanned_and_unrolled_hold_the_same(loaded: Callable, storage: Storage):
    whole, scanned = by_tensor(loaded(storage, True)), by_tensor(loaded(storage, False))
    assert set(whole) == set(scanned)
    for name, part in whole.items():
        assert part.tobytes() == scanned[name].tobytes(), name


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
def test_shapes_without_weights_are_those_with_them(
    loaded: Callable, config: ModelConfig, storage: Storage, unrolled: bool
):
    tree, params = loaded(storage, unrolled)
    abstract = abstract_params(config, tree)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)


def test_every_leaf_is_placed_by_the_caller(tiny_dir: Path, config: ModelConfig):
    tree = leaf_tree(config, "packed", False)
    placed: list[Leaf] = []

    def put(array: np.ndarray, leaf: Leaf) -> jax.Array:
        placed.append(leaf)
        assert array.shape == leaf.full_shape
        return jax.numpy.asarray(array)

    load_params(tiny_dir, config, tree, put=put, progress=False)
    assert placed == all_leaves(tree)


# Errors come from the checkpoint, before anything is placed.


def refuse(array: np.ndarray, leaf: Leaf) -> jax.Array:
    raise AssertionError(f"{leaf.names[0]} was read")


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "tiny"))


def test_a_truncated_shard_is_refused(copy: Path, config: ModelConfig):
    shard = copy / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=f"{shard.name}: found {len(whole) - 7} bytes, expected {len(whole)}"):
        load_params(copy, config, leaf_tree(config, "packed", True), put=refuse, progress=False)


def test_a_missing_tensor_is_refused(copy: Path, config: ModelConfig):
    index = copy / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    del where["weight_map"]["layers.3.attn.wq_a.weight"]
    index.write_text(json.dumps(where))
    with pytest.raises(CheckpointError, match="layers.3.attn.wq_a.weight"):
        load_params(copy, config, leaf_tree(config, "packed", True), put=refuse, progress=False)


def test_another_tokenizer_is_refused(copy: Path, config: ModelConfig):
    """Q and q are one compressed id; a tokenizer without Q has one more of them, and Engram rows would be wrong."""
    path = copy / "tokenizer.json"
    words = json.loads(path.read_text())
    assert "Q" not in str(words["model"]["merges"])
    words["model"]["vocab"]["!!"] = words["model"]["vocab"].pop("Q")
    path.write_text(json.dumps(words))
    expected = config.engram.compressed_vocab_size
    with pytest.raises(
        EngramError, match=f"found {expected + 1} compressed ids, expected engram_compressed_vocab_size {expected}"
    ):
        load_params(copy, config, leaf_tree(config, "packed", True), put=refuse, progress=False)
