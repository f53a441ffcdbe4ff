"""From a checkpoint to what the engine carries: plain arrays by leaf, and the static program beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from rorqual.model import number_formats
from rorqual.model.checkpoint import Checkpoint, open_checkpoint
from rorqual.model.config import ModelConfig, read_config
from rorqual.model.declarations import declare
from rorqual.model.engram_hash import compressed_map, engram_hash
from rorqual.model.forward import Params, Program, graph_name
from rorqual.model.layers.block import Block
from rorqual.model.layers.engram import Engram, HashConstants
from rorqual.model.layers.kinds import LayerKind, cache_layout, segments
from rorqual.model.layers.linear import Linear, RMSNorm
from rorqual.model.leaves import Leaf, Storage, Tree, all_leaves, backbone_leaves

LOADED_PARTS = ("backbone", "engram")
UNROLLED_UP_TO = 12  # layers; more are scanned, so that compile time stops growing with depth

Put = Callable[[np.ndarray, Leaf], jax.Array]


def default_storage() -> Storage:
    """Form of the weights where none is asked for.

    Accelerators keep them packed. A CPU takes bfloat16 where it has instructions for it and float32 elsewhere
    (figures: docs/measurements.md).
    """
    if jax.default_backend() != "cpu":
        return "packed"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def memory_dtype(leaf: Leaf) -> np.dtype:
    return jnp.dtype(leaf.dtype)


def _read_tensor(checkpoint: Checkpoint, name: str, leaf: Leaf) -> np.ndarray:
    stored, dtype = checkpoint.read(name), memory_dtype(leaf)
    if leaf.form == "stored":
        return stored.astype(dtype, copy=False)
    scale = checkpoint.read(name.removesuffix(".weight") + ".scale")
    decode = number_formats.dequantise_fp8_tiles if leaf.form == "fp8" else number_formats.dequantise_fp4_rows
    if leaf.dtype == "uint16":
        return decode(stored, scale, jnp.dtype(jnp.bfloat16)).view(np.uint16)
    return decode(stored, scale, dtype)


def read_leaf(checkpoint: Checkpoint, leaf: Leaf, progress: tqdm) -> np.ndarray:
    """One leaf, tensor by tensor, in its full shape."""
    if not leaf.lead:
        progress.update(1)
        return np.ascontiguousarray(_read_tensor(checkpoint, leaf.names[0], leaf))
    whole = np.empty((len(leaf.names), *leaf.shape), memory_dtype(leaf))
    for place, name in enumerate(leaf.names):
        whole[place] = _read_tensor(checkpoint, name, leaf)
        progress.update(1)
    return whole.reshape(leaf.full_shape)


def map_leaves(tree: Any, function: Callable[[Leaf], Any]) -> Any:
    """The tree with every leaf replaced."""
    if isinstance(tree, Leaf):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_leaves(value, function) for key, value in tree.items()}
    return [map_leaves(value, function) for value in tree]


def _abstract(tree: Any) -> Any:
    return map_leaves(tree, lambda leaf: jax.ShapeDtypeStruct(leaf.full_shape, memory_dtype(leaf)))


def _graph(module: nnx.Module) -> Any:
    return nnx.split(module)[0]


def build_program(
    config: ModelConfig, tree: Tree, *, unrolled: bool, tile_rows: int = 0, expert_rows: int = 0
) -> Program:
    """The static side of the model: segments, module structures, hash constants. Needs shapes only."""
    layout = cache_layout(config, with_draft=False)
    parts = segments(config, unrolled)
    graphs: dict[str, Any] = {
        "norm": _graph(RMSNorm(_abstract(tree["norm"]), config.norm_eps)),
        "head": _graph(Linear(_abstract(tree["head"]))),
    }
    if tree["engram"]["layers"]:
        graphs["engram"] = _graph(Engram(_abstract(tree["engram"]["layers"][0]), config))

    def add(kind: LayerKind, leaves: Any) -> None:
        if graph_name(kind) not in graphs:
            graphs[graph_name(kind)] = _graph(Block(_abstract(leaves), config, layout, kind))

    for segment, leaves in zip(parts, tree["layers"], strict=True):
        add(segment.leader, leaves["leader"])
        if segment.follower is not None:
            add(segment.follower, leaves["followers"])
    return Program(config, layout, parts, tuple(graphs.items()), hash_constants(config), tile_rows, expert_rows)


def hash_constants(config: ModelConfig) -> tuple[HashConstants, ...]:
    """Constants of the Engram hash by layer. They depend on the number of compressed ids, not on the map itself."""
    some_map = np.minimum(np.arange(config.vocab_size, dtype=np.int32), config.engram.compressed_vocab_size - 1)
    host = engram_hash(config, some_map)
    return tuple(
        HashConstants(
            tuple((int(word) & 0xFFFFFFFF, int(word) >> 32) for word in host.multipliers[place]),
            tuple(int(prime) for prime in host.primes[place].reshape(-1)),
            tuple(int(offset) for offset in host.offsets[place].reshape(-1)),
        )
        for place in range(len(config.engram.layers))
    )


def load_token_map(model_dir: Path, config: ModelConfig) -> jax.Array:
    """Compressed id of every token, int32 `[vocab]`; EngramError when the tokenizer is not the config's."""
    return jnp.asarray(engram_hash(config, compressed_map(model_dir / "tokenizer.json")).token_map, jnp.int32)


def is_unrolled(config: ModelConfig) -> bool:
    return config.n_layers <= UNROLLED_UP_TO


def leaf_tree(config: ModelConfig, storage: Storage, unrolled: bool) -> Tree:
    """The plan of the parameter tree."""
    return backbone_leaves(declare(config), segments(config, unrolled), config.engram.layers, storage)


def abstract_params(config: ModelConfig, tree: Tree) -> Params:
    """Shapes and types of the parameters, for compiling without weights."""
    params = _abstract(tree)
    params["engram"]["token_map"] = jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32)
    return params


def load_params(
    model_dir: Path, config: ModelConfig, tree: Tree, *, put: Put | None = None, progress: bool = True
) -> Params:
    """Read the tensors of a parameter plan from a checkpoint folder in the released layout.

    `put` places a leaf on devices (None: the default device). Raises CheckpointError with the name that is wrong
    before any tensor is read.
    """
    checkpoint = open_checkpoint(model_dir, declare(config), LOADED_PARTS)
    token_map = load_token_map(model_dir, config)
    place: Put = put or (lambda array, leaf: jnp.asarray(array))
    total = sum(len(leaf.names) for leaf in all_leaves(tree))
    with tqdm(total=total, desc="loading weights", unit="tensor", disable=not progress) as bar:
        params = map_leaves(tree, lambda leaf: place(read_leaf(checkpoint, leaf, bar), leaf))
    params["engram"]["token_map"] = token_map
    return params


def load_model(
    model_dir: Path,
    *,
    storage: Storage | None = None,
    unrolled: bool | None = None,
    tile_rows: int = 0,
    expert_rows: int = 0,
    progress: bool = True,
) -> tuple[Params, Program]:
    """Parameters and program of a checkpoint folder on the default device, for use without an engine."""
    config = read_config(model_dir)
    unrolled = is_unrolled(config) if unrolled is None else unrolled
    tree = leaf_tree(config, storage or default_storage(), unrolled)
    program = build_program(config, tree, unrolled=unrolled, tile_rows=tile_rows, expert_rows=expert_rows)
    return load_params(model_dir, config, tree, progress=progress), program
