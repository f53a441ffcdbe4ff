"""Logical axes to mesh axes. Modules name the axes of their arrays; only this folder knows the mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rorqual.sharding.mesh import RANK

Rules = Mapping[str, str | None]

# What each rank owns a part of. Every axis that is not named here must be named in REPLICATED: a typo is an error.
RULES: Rules = {
    "expert": RANK,
    "engram_row": RANK,
    "seat": RANK,
    "line": RANK,
    "row": RANK,
    "penalty_row": RANK,
}
REPLICATED = frozenset({"vocab", "dim", "heads", "kv", "q_lora", "o_lora", "inter", "index_heads", "layer"})


class ShardingError(ValueError):
    """A logical axis without a rule, or two dims of one array on one mesh axis."""


def spec_for(axes: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """Partition spec of an array with these logical axes.

    Raises ShardingError for an axis that has no rule and is not known as replicated, and for a mesh axis used twice.
    """
    placed: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in rules and axis not in REPLICATED:
            raise ShardingError(f"axis {axis!r} of {tuple(axes)}: no rule, known are {sorted({*rules, *REPLICATED})}")
        target = rules.get(axis) if axis is not None else None
        if target is not None and target in placed:
            raise ShardingError(f"axes {tuple(axes)}: two of them go to mesh axis {target!r} by rules {dict(rules)}")
        placed.append(target)
    return PartitionSpec(*placed)


def sharding_for(mesh: Mesh, axes: Sequence[str | None], rules: Rules = RULES) -> Any:
    """`spec_for` on a mesh."""
    return NamedSharding(mesh, spec_for(axes, rules))
