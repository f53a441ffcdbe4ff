"""Everything an engine is made of, resolved once: model, limits, memory, programs."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rorqual.model.config import ModelConfig, read_config
from rorqual.model.forward import Params, Program
from rorqual.model.leaves import Leaf, Storage, Tree, all_leaves
from rorqual.model.load import (
    abstract_params,
    build_program,
    default_storage,
    is_unrolled,
    leaf_tree,
    load_params,
)
from rorqual.serve.buckets import Buckets, bucket_table
from rorqual.serve.compiles import use_compile_cache
from rorqual.serve.limits import Limits
from rorqual.serve.memory import MemoryPlan, budget_bytes, plan_memory
from rorqual.serve.options import EngineOptions, engine_limits, resolve_context
from rorqual.serve.programs import Programs, leaf_spec
from rorqual.serve.state import StateSizes, abstract_state
from rorqual.serve.step_input import FillShape
from rorqual.sharding.mesh import make_mesh

log = logging.getLogger("rorqual.build")
PENALTY_ROWS = 16
SPARE_STOP_IDS = 4  # beside stop_token_ids: the model's own EOS ids


@dataclass(frozen=True)
class Built:
    """The parts of an engine."""

    options: EngineOptions
    config: ModelConfig
    limits: Limits
    buckets: Buckets
    memory: MemoryPlan
    sizes: StateSizes
    programs: Programs
    params: Params
    eos_ids: tuple[int, ...]


def weight_bytes(tree: Tree) -> dict[str, int]:
    """Bytes of the loaded weights by kind."""
    kinds = {"experts": 0, "Engram tables": 0, "embedding and head": 0, "other": 0}
    for leaf in all_leaves(tree):
        name = leaf.names[0]
        if ".ffn.experts." in name:
            kinds["experts"] += leaf.nbytes
        elif ".engram.embed." in name:
            kinds["Engram tables"] += leaf.nbytes
        elif name in ("embed.weight", "head.weight"):
            kinds["embedding and head"] += leaf.nbytes
        else:
            kinds["other"] += leaf.nbytes
    return kinds


def state_sizes(limits: Limits, num_global_pages: int, num_window_pages: int) -> StateSizes:
    """Sizes of the device state behind these limits."""
    return StateSizes(
        num_seats=limits.max_rows,
        num_global_pages=num_global_pages,
        num_window_pages=num_window_pages,
        pages_per_seat=-(-limits.max_context // limits.page_size),
        num_penalty_rows=min(limits.max_rows, PENALTY_ROWS),
        fill=FillShape(limits.max_stop_token_ids + SPARE_STOP_IDS, limits.max_logit_bias),
    )


@dataclass
class _Planner:
    """Compiles the largest step for a number of pages, and keeps the last one."""

    program: Program
    tree: Tree
    limits: Limits
    buckets: Buckets
    mesh: jax.sharding.Mesh
    config: ModelConfig
    programs: Programs | None = None

    def temp_bytes(self, num_global_pages: int, num_window_pages: int) -> int:
        sizes = state_sizes(self.limits, num_global_pages, num_window_pages)
        shapes = abstract_params(self.config, self.tree)
        self.programs = Programs(self.program, self.tree, shapes, sizes, self.buckets, self.mesh)
        return self.programs.temp_bytes(self.buckets.token_sizes[-1])


def _seat_bytes(program: Program, limits: Limits) -> int:
    state: Any = abstract_state(program, state_sizes(limits, 1, 1))
    return sum(
        int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves((state.seats, state.counts, state.seen))
    )


def read_eos_ids(model_dir: Path, config: ModelConfig) -> tuple[int, ...]:
    """EOS ids of the config and of generation_config.json, where there is one."""
    path = model_dir / "generation_config.json"
    more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", []) if path.exists() else []
    found = [config.eos_id, *(more if isinstance(more, list) else [more])]
    for token in found:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ValueError(f"{path}: eos_token_id {token!r}, allowed 0..{config.vocab_size - 1}")
    unique = tuple(dict.fromkeys(found))
    if len(unique) > SPARE_STOP_IDS:
        raise ValueError(f"{path}: {len(unique)} EOS ids, allowed at most {SPARE_STOP_IDS}")
    return unique


def build(model_dir: Path, options: EngineOptions) -> Built:
    """Read the config, plan the memory, compile the largest step, load the weights.

    Raises ConfigError, CheckpointError and OptionError before anything large is read.
    """
    if options.compile_cache is not None:
        use_compile_cache(Path(options.compile_cache))
    config = read_config(model_dir)
    context = resolve_context(options, config.max_context)
    options = replace(options, context=context)
    limits = engine_limits(
        options,
        vocab_size=config.vocab_size,
        context=context,
        page_size=config.window_size,
        image_token_id=config.image_token_id,
    )
    eos_ids = read_eos_ids(model_dir, config)
    storage: Storage = default_storage() if options.weights == "auto" else options.weights
    unrolled = is_unrolled(config)
    tree = leaf_tree(config, storage, unrolled)
    program = build_program(config, tree, unrolled=unrolled, tile_rows=options.row_tile, expert_rows=options.row_tile)
    buckets = bucket_table(options.step_tokens, options.max_rows)
    mesh = make_mesh(jax.devices()[:1])
    planner = _Planner(program, tree, limits, buckets, mesh, config)
    memory = plan_memory(
        budget=budget_bytes(options, mesh.devices.flat[0]),
        weights_bytes=weight_bytes(tree),
        layout=program.layout,
        context=context,
        max_rows=limits.max_rows,
        largest_step=buckets.token_sizes[-1],
        other_bytes=_seat_bytes(program, limits),
        temp_bytes_of=planner.temp_bytes,
    )
    log.info("memory of one rank (weights kept as %s):\n%s", storage, memory.table())

    def put(array: np.ndarray, leaf: Leaf) -> jax.Array:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, leaf_spec(leaf)))

    params = load_params(model_dir, config, tree, put=put, progress=options.progress)
    assert planner.programs is not None
    sizes = planner.programs.sizes
    return Built(options, config, limits, buckets, memory, sizes, planner.programs, params, eos_ids)
