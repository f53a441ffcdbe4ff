"""The mesh: one axis of ranks, which is the data axis and the expert axis at once."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

RANK = "rank"


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """One rank per device. The axis is Auto: what a rank computes is written out inside shard_map."""
    if not devices:
        raise ValueError("devices: 0, allowed at least 1")
    return Mesh(np.array(devices), (RANK,), axis_types=(AxisType.Auto,))
