"""The compiled programs of one engine: a step for every bucket, and the one that fills seats."""

import logging
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from rorqual.model.forward import Params, Program
from rorqual.model.leaves import Leaf, Tree
from rorqual.model.load import map_leaves
from rorqual.serve.buckets import Buckets
from rorqual.serve.compiles import counting
from rorqual.serve.state import State, StateSizes, abstract_state, fill_seats, state_axes
from rorqual.serve.step import StepConfig, StepInput, step
from rorqual.serve.step_input import FILL_SEATS, StepShape
from rorqual.sharding.mesh import RANK
from rorqual.sharding.rules import spec_for

log = logging.getLogger("rorqual.programs")


def leaf_spec(leaf: Leaf) -> PartitionSpec:
    """Placement of a parameter leaf by its logical axes."""
    return spec_for((*leaf.lead_axes, *leaf.axes))


class Programs:
    """Compiles from shapes alone; nothing here holds weights or state."""

    def __init__(self, program: Program, tree: Tree, params: Params, sizes: StateSizes, buckets: Buckets, mesh: Mesh):
        """`tree`: the parameter plan; `params`: the parameters, or their shapes."""
        specs = map_leaves(tree, leaf_spec)
        specs["engram"]["token_map"] = PartitionSpec()
        self.sizes, self.buckets, self.mesh, self._program = sizes, buckets, mesh, program
        self._params = self._placed(params, specs)
        abstract = abstract_state(program, sizes)
        state_specs = jax.tree.map(spec_for, state_axes(abstract), is_leaf=_is_axes)
        self.abstract_state: State = self._placed(abstract, state_specs)
        self._params_specs = tuple(jax.tree.leaves(specs, is_leaf=_is_spec))
        self._state_specs = tuple(jax.tree.leaves(state_specs, is_leaf=_is_spec))
        self._by_rank = NamedSharding(mesh, PartitionSpec(RANK))
        self._steps: dict[tuple[int, bool], Any] = {}
        self._fill: Any = None
        self._idle_masks: dict[int, jax.Array] = {}

    def _placed(self, tree: Any, specs: Any) -> Any:
        def shape(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(shape, tree, specs)

    def shape(self, bucket: int) -> StepShape:
        """Sizes of the step of a bucket."""
        return StepShape(bucket, self.buckets.rows(bucket), self._program.layout.page_size)

    def trace_step(self, bucket: int, score: bool = False) -> Any:
        """The step of a bucket, traced from shapes."""
        shape = self.shape(bucket)
        config = StepConfig(self._program, shape, self.mesh, self._params_specs, self._state_specs, score)
        return step.trace(self._params, self.abstract_state, self._abstract_input(shape), config=config)

    def _abstract_input(self, shape: StepShape) -> StepInput:
        ranks = self.mesh.devices.size
        words = -(-self._program.config.vocab_size // 32)
        packed: Any = jax.ShapeDtypeStruct((ranks, shape.length), jnp.int32, sharding=self._by_rank)
        mask: Any = jax.ShapeDtypeStruct((ranks, shape.num_rows, words), jnp.uint32, sharding=self._by_rank)
        return StepInput(packed, mask)

    def step(self, bucket: int, score: bool = False) -> Any:
        """The compiled step of a bucket; the scoring variant is compiled when it is first wanted."""
        key = (bucket, score)
        if key not in self._steps:
            self._prepare_bucket(bucket)
            started = time.monotonic()
            with counting(None):
                self._steps[key] = self.trace_step(bucket, score).lower().compile()
            kind = "scoring step" if score else "step"
            log.info("%s of %d tokens compiled in %.1f s", kind, bucket, time.monotonic() - started)
        return self._steps[key]

    @property
    def fill(self) -> Any:
        """The compiled program that gives seats to requests."""
        if self._fill is None:
            body = jax.jit(partial(fill_seats, shape=self.sizes.fill), donate_argnums=0)
            rows = jax.ShapeDtypeStruct((FILL_SEATS, self.sizes.fill.length), jnp.int32)
            with counting(None):
                self._fill = body.lower(self.abstract_state, rows).compile()
        return self._fill

    def send(self, packed: np.ndarray, mask: np.ndarray | None = None) -> StepInput:
        """Put a step's input on the device. `packed [length]`, `mask [R, words]` or None for the idle one."""
        on_device = jax.device_put(packed[None], self._by_rank)
        if mask is None:
            return StepInput(on_device, self._idle_masks[len(packed)])
        return StepInput(on_device, jax.device_put(mask[None], self._by_rank))

    def _prepare_bucket(self, bucket: int) -> None:
        """The idle array of a bucket's mask: always the same one, so that it costs no transfer."""
        shape = self.shape(bucket)
        abstract = self._abstract_input(shape)
        idle = np.zeros(abstract.mask.shape, np.uint32)
        self._idle_masks[shape.length] = jax.device_put(idle, self._by_rank)

    def new_state(self) -> State:
        """Zeroed state on the devices."""
        return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), self.abstract_state)

    def compile_all(self, progress: bool) -> None:
        """Every program that serving needs."""
        for bucket in tqdm(self.buckets.token_sizes, desc="compiling steps", unit="program", disable=not progress):
            self.step(bucket)
        _ = self.fill

    def temp_bytes(self, bucket: int) -> int:
        """Temporaries of a bucket's step."""
        return int(self.step(bucket).memory_analysis().temp_size_in_bytes)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_axes(x: Any) -> bool:
    return type(x) is tuple and all(axis is None or isinstance(axis, str) for axis in x)
