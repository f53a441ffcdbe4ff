"""The parameter tree: which checkpoint tensors make up each leaf, in which form, stacked how.

Everything about a leaf follows from the declarations: its shape, its memory type, its logical axes, the tensors that
fill it. No jax here; `model/load.py` turns the plan into arrays or into abstract shapes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rorqual.model.declarations import Weight
from rorqual.model.layers.kinds import Segment

Storage = Literal["packed", "bfloat16", "float32"]
ITEM_BYTES = {"uint8": 1, "uint16": 2, "bfloat16": 2, "float32": 4}
KEPT_BF16 = ("embed.weight",)  # looked up, never multiplied


@dataclass(frozen=True)
class Leaf:
    """`names` fill the leaf in row-major order of the stacking dims `lead`; each has shape `shape` in memory type
    `dtype`. `form`: stored codes as they are, or decoded from FP8 tiles or FP4 rows."""

    names: tuple[str, ...]
    lead: tuple[int, ...]
    lead_axes: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str
    form: Literal["stored", "fp8", "fp4"]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.lead + self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.full_shape) * ITEM_BYTES[self.dtype]


Tree = dict[str, Any]


def _stack(leaves: Iterable[Leaf], axis: str) -> Leaf:
    parts = list(leaves)
    names = tuple(name for part in parts for name in part.names)
    first = parts[0]
    return replace(first, names=names, lead=(len(parts), *first.lead), lead_axes=(axis, *first.lead_axes))


def stack_trees(trees: list[Tree], axis: str) -> Tree:
    """Equal trees of leaves -> one tree with a leading stacking dim."""
    first = trees[0]
    return {
        key: stack_trees([tree[key] for tree in trees], axis)
        if isinstance(value, dict)
        else _stack((tree[key] for tree in trees), axis)
        for key, value in first.items()
    }


def _leaf(weight: Weight, storage: Storage) -> Leaf | None:
    """The leaf of one tensor, or None where the storage folds it into another (scales of decoded weights)."""

    def make(dtype: str, form: Literal["stored", "fp8", "fp4"], shape: tuple[int, ...]) -> Leaf:
        return Leaf((weight.name,), (), (), shape, weight.axes, dtype, form)

    if weight.dtype == "F32":
        return make("float32", "stored", weight.shape)
    if weight.dtype == "BF16":
        widened = storage == "float32" and len(weight.shape) == 2 and weight.name not in KEPT_BF16
        return make("float32" if widened else "bfloat16", "stored", weight.shape)
    if storage == "packed" or ".engram.embed." in weight.name:
        return make("uint8", "stored", weight.shape)
    if weight.dtype == "F8_E8M0":
        return None
    if weight.dtype == "I8":
        # bf16 numbers of experts travel as their bits: XLA would widen a whole stack of bf16 ahead of the loop over
        # tiles (CPU, jax 0.10.2), and integers it leaves alone.
        bits = "uint16" if storage == "bfloat16" else storage
        return make(bits, "fp4", (weight.shape[0], weight.shape[1] * 2))
    return make(storage, "fp8", weight.shape)


def _insert(tree: Tree, path: list[str], leaf: Leaf) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _path(local_name: str) -> list[str]:
    """Place in the tree of a name without its layer prefix; hc_attn_fn and its like become hc_attn / fn."""
    if local_name.startswith("hc_"):
        return list(local_name.rsplit("_", 1))
    return local_name.split(".")


def subtree(declarations: dict[str, Weight], prefix: str, storage: Storage) -> Tree:
    """All leaves below a prefix; numbered experts are stacked."""
    tree: Tree = {}
    for name, weight in declarations.items():
        if name.startswith(prefix):
            leaf = _leaf(weight, storage)
            if leaf is not None:
                _insert(tree, _path(name[len(prefix) :]), leaf)
    ffn = tree.get("ffn", {})
    if "experts" in ffn:
        numbered = ffn["experts"]
        ffn["experts"] = stack_trees([numbered[str(i)] for i in range(len(numbered))], "expert")
    return tree


def _segment_tree(segment: Segment, layer: Callable[[int], Tree]) -> Tree:
    """{"leader": ..., "followers": ...}, each stacked over its layers in order (one layer: a stack of one)."""
    leaders = [segment.first + i * segment.unit for i in range(segment.repeats)]
    tree = {"leader": stack_trees([layer(number) for number in leaders], "layer")}
    if segment.num_followers:
        followers = [number for number in segment.layers if number not in leaders]
        tree["followers"] = stack_trees([layer(number) for number in followers], "layer")
    return tree


def by_layer(declarations: dict[str, Weight]) -> dict[str, dict[str, Weight]]:
    """Declarations grouped by their prefix "layers.N." or "mtp.N." (one pass: the release has 96,085 names)."""
    groups: dict[str, dict[str, Weight]] = {}
    for name, weight in declarations.items():
        head = name.split(".", 2)
        prefix = f"{head[0]}.{head[1]}." if head[0] in ("layers", "mtp") else ""
        groups.setdefault(prefix, {})[name] = weight
    return groups


def backbone_leaves(
    declarations: dict[str, Weight], segments: tuple[Segment, ...], engram_layers: tuple[int, ...], storage: Storage
) -> Tree:
    """The tree of the backbone and its Engram layers, in the shape that `model/forward.py` takes."""
    groups = by_layer(declarations)

    def layer(number: int) -> Tree:
        prefix = f"layers.{number}."
        tree = subtree(groups[prefix], prefix, storage)
        tree.pop("engram", None)
        return tree

    ends = subtree(groups[""], "", storage)
    memory = [subtree(groups[f"layers.{n}."], f"layers.{n}.engram.", storage) for n in engram_layers]
    return {
        "embed": ends["embed"],
        "norm": ends["norm"],
        "head": ends["head"],
        "layers": [_segment_tree(segment, layer) for segment in segments],
        "engram": {"layers": memory},
    }


def all_leaves(tree: Any) -> list[Leaf]:
    """The leaves of a tree in order."""
    if isinstance(tree, Leaf):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [leaf for value in values for leaf in all_leaves(value)]
