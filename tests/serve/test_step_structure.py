"""What the step is made of, read off its trace and its compiled text: nothing here runs it or holds a weight.

Programs are built from shapes, so the released model and pools of any size cost no memory.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model.config import ModelConfig
from rorqual.model.load import abstract_params, build_program, leaf_tree
from rorqual.serve.buckets import bucket_table
from rorqual.serve.build import state_sizes
from rorqual.serve.compiles import use_compile_cache
from rorqual.serve.limits import Limits
from rorqual.serve.programs import Programs
from rorqual.sharding.mesh import make_mesh

ROOT = Path(__file__).parents[2]
SORTS = {"sort", "top_k", "approx_top_k"}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
HOST = ("infeed", "outfeed", "send", "recv")
WIDE = {"float64", "int64", "uint64", "complex128"}
PAGES = 400_000


def programs(config: ModelConfig, *, unrolled: bool, tokens: int, rows: int, context: int, pages: int) -> Programs:
    """Programs of an engine with `pages` global pages and a tenth as many window pages."""
    limits = Limits(config.vocab_size, context, rows, tokens, config.window_size, image_token_id=config.image_token_id)
    tree = leaf_tree(config, "packed", unrolled)
    program = build_program(config, tree, unrolled=unrolled)
    sizes = state_sizes(limits, pages, pages // 10)
    mesh = make_mesh(jax.devices()[:1])
    return Programs(program, tree, abstract_params(config, tree), sizes, bucket_table(tokens, rows), mesh)


@pytest.fixture(scope="module", autouse=True)
def compile_cache() -> None:
    use_compile_cache(ROOT / ".cache" / "test-programs")


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(json.loads(files("rorqual.model").joinpath("released_config.json").read_text()))


@pytest.fixture(scope="module")
def bench() -> ModelConfig:
    """The 12-layer config of tools/make_bench_checkpoint.py."""
    spec = importlib.util.spec_from_file_location("bench", ROOT / "tests" / "tools" / "make_bench_checkpoint.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = {"model_type": "deepseek_v41_text", **script.BENCH}
    # With the map of the released tokenizer, as in the released config.
    text |= {"engram_compressed_vocab_size": 99092, "engram_num_embeddings": script.engram_rows(text)}
    return ModelConfig.from_json(
        {
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": 129264,
            "text_config": text,
            "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "expert_dtype": "fp4",
                "scale_fmt": "ue8m0",
                "weight_block_size": [32, 32],
            },
        }
    )


@pytest.fixture(scope="module")
def tiny_config(tiny_dir: Path) -> ModelConfig:
    return ModelConfig.from_json(json.loads((tiny_dir / "config.json").read_text()))


@pytest.fixture(scope="module")
def released_trace(released: ModelConfig) -> Any:
    """The largest step of the released model, 64 rows of up to 131,072 tokens, traced."""
    return released_programs(released).trace_step(256)


def released_programs(released: ModelConfig) -> Programs:
    return programs(released, unrolled=False, tokens=256, rows=64, context=131_072, pages=64 * 1024)


@pytest.fixture(scope="module")
def tiny_step(tiny_config: ModelConfig) -> Any:
    """The compiled step of golden/tiny over large pools, layer by layer."""
    return tiny_programs(tiny_config, True, PAGES).step(16)


def tiny_programs(config: ModelConfig, unrolled: bool, pages: int) -> Programs:
    return programs(config, unrolled=unrolled, tokens=64, rows=8, context=512, pages=pages)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Jaxprs in the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def equations(jaxpr: Any, into_branches: bool = True) -> Iterator[Any]:
    """All equations of a jaxpr, inner ones included; those of conditional branches only where wanted."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "cond" or into_branches:
            for inner in inner_jaxprs(equation):
                yield from equations(inner, into_branches)


def num_equations(traced: Any) -> int:
    return sum(1 for _ in equations(traced.jaxpr.jaxpr))


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# Compile time does not grow with depth.


def test_the_released_step_is_less_than_twice_the_bench_step(released_trace: Any, bench: ModelConfig):
    """40 layers against 12: layers of one kind share one traced body."""
    small = programs(bench, unrolled=False, tokens=256, rows=64, context=32_768, pages=4000).trace_step(256)
    assert num_equations(released_trace) < 2 * num_equations(small)


def test_more_layers_of_a_kind_add_nothing_to_the_trace(released: ModelConfig, released_trace: Any):
    shallow = replace(
        released,
        n_layers=32,
        compress_ratios=released.compress_ratios[:32] + released.compress_ratios[40:],
        index_source_layers=tuple(layer for layer in released.index_source_layers if layer < 32),
    )
    assert num_equations(released_programs(shallow).trace_step(256)) == num_equations(released_trace)


@pytest.mark.slow
def test_the_released_step_compiles_in_little_memory(released: ModelConfig):
    """From shapes alone. Every array of the state is written where it lies."""
    built = released_programs(released)
    memory = built.step(256).memory_analysis()
    assert memory.temp_size_in_bytes < 4e9
    assert memory.alias_size_in_bytes >= num_bytes(built.abstract_state)
    assert num_bytes(built.abstract_state.pools) > 7e9


# Donation takes effect, and no temporary is as large as a pool.


def smallest_pool_bytes(built: Programs) -> int:
    return min(num_bytes(pool) for pool in jax.tree.leaves(built.abstract_state.pools))


def check_memory(config: ModelConfig, unrolled: bool, compiled: Any) -> None:
    small, large = tiny_programs(config, unrolled, PAGES), tiny_programs(config, unrolled, 2 * PAGES)
    memory, more = compiled.memory_analysis(), large.step(16).memory_analysis()
    assert memory.temp_size_in_bytes < smallest_pool_bytes(small) / 2
    assert more.temp_size_in_bytes < 1.01 * memory.temp_size_in_bytes
    assert memory.alias_size_in_bytes >= num_bytes(small.abstract_state)
    assert more.alias_size_in_bytes >= num_bytes(large.abstract_state)


def test_no_temporary_grows_with_the_pools(tiny_config: ModelConfig, tiny_step: Any):
    check_memory(tiny_config, True, tiny_step)


@pytest.mark.slow
def test_no_temporary_grows_with_the_pools_in_a_scan(tiny_config: ModelConfig):
    check_memory(tiny_config, False, tiny_programs(tiny_config, False, PAGES).step(16))


def test_every_state_array_has_its_output_in_its_own_place(tiny_config: ModelConfig, tiny_step: Any):
    """Output i of the state is aliased to the parameter that holds state array i."""
    header = tiny_step.as_text().split("\n", 1)[0]
    aliases = {int(out): int(of) for out, of in re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)}
    state = jax.tree.leaves(tiny_programs(tiny_config, True, PAGES).abstract_state)
    assert sorted(aliases) == list(range(len(state)))
    parameters = entry_parameters(tiny_step.as_text())
    for place, array in enumerate(state):
        assert parameters[aliases[place]] == tuple(array.shape)
    assert [aliases[i] for i in sorted(aliases)] == sorted(aliases.values())


def entry_parameters(hlo: str) -> dict[int, tuple[int, ...]]:
    """Shape of every parameter of the entry computation by number."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* parameter\((\d+)\)", hlo[hlo.index("\nENTRY ") :])
    return {int(number): tuple(int(n) for n in dims.split(",") if n) for dims, number in found}


# A greedy step sorts nothing at run time.


class Hlo:
    """Computations of a compiled module: the instructions of each, and whom it calls, always or as a branch."""

    def __init__(self, text: str) -> None:
        self.lines: dict[str, list[str]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
            if head:
                name = head[2]
                self.lines[name] = []
                self.entry = name if head[1] else self.entry
            elif name and line.startswith("  "):
                self.lines[name].append(line)

    def calls(self, name: str, as_branch: bool) -> set[str]:
        """Computations that an instruction of `name` calls; branches of conditionals apart from the rest."""
        called = set()
        for line in self.lines[name]:
            branches = re.findall(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))", line)
            parts = {part.strip().lstrip("%") for pair in branches for part in ",".join(pair).split(",")} - {""}
            every = {part for part in re.findall(r"%([\w.\-]+)", line) if part in self.lines}
            called |= parts if as_branch else every - parts
        return called

    def reached(self, into_branches: bool) -> set[str]:
        """Computations reached from the entry."""
        found, ahead = set(), [self.entry]
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                ahead.extend(self.calls(name, False))
                if into_branches:
                    ahead.extend(self.calls(name, True))
        return found

    def instructions(self, names: set[str]) -> Iterator[str]:
        for name in names:
            yield from self.lines[name]


def sorts_or_ranks(line: str) -> bool:
    return re.search(r"[ )]sort\(", line) is not None or 'custom_call_target="TopK"' in line


def test_the_parser_tells_branches_from_what_always_runs():
    def f(x: jax.Array, p: jax.Array) -> jax.Array:
        always = jax.lax.fori_loop(0, p, lambda i, y: y + jnp.cumsum(y), x)
        return jax.lax.cond(p > 3, lambda y: jnp.sort(y), lambda y: y, always)

    x, p = jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    guarded = Hlo(jax.jit(f).lower(x, p).compile().as_text())
    assert not any(map(sorts_or_ranks, guarded.instructions(guarded.reached(False))))
    assert any(map(sorts_or_ranks, guarded.instructions(guarded.reached(True))))
    naked = Hlo(jax.jit(lambda x, p: f(jnp.sort(x), p)).lower(x, p).compile().as_text())
    assert any(map(sorts_or_ranks, naked.instructions(naked.reached(False))))


def test_every_sort_of_the_compiled_step_is_in_a_branch(tiny_step: Any):
    hlo = Hlo(tiny_step.as_text())
    always = hlo.reached(into_branches=False)
    assert len(always) > 50, "the parser lost its way"
    assert [line for line in hlo.instructions(always) if sorts_or_ranks(line)] == []
    assert any(map(sorts_or_ranks, hlo.instructions(hlo.reached(True)))), "nothing to guard: the test sees nothing"


def test_every_sort_of_the_released_step_is_in_a_branch(released_trace: Any):
    """The same on the trace, whatever the backend."""
    jaxpr = released_trace.jaxpr.jaxpr
    always = {equation.primitive.name for equation in equations(jaxpr, into_branches=False)}
    assert not always & SORTS
    assert SORTS & {equation.primitive.name for equation in equations(jaxpr)}


# One device, 32 bits, no way back to the host.


def test_the_released_step_has_no_wide_numbers_and_calls_nobody(released_trace: Any):
    names = set()
    for equation in equations(released_trace.jaxpr.jaxpr):
        names.add(equation.primitive.name)
        for variable in equation.outvars:
            assert str(getattr(variable.aval, "dtype", "")) not in WIDE, f"{equation.primitive}: {variable.aval}"
    assert not {name for name in names if "callback" in name}
    assert not names & {"psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "ragged_all_to_all"}


def test_the_compiled_step_has_no_wide_numbers_and_calls_nobody(tiny_step: Any):
    text = tiny_step.as_text()
    assert not re.search(r"\b(f64|c128)\[", text)
    for name in (*COLLECTIVES, *HOST):
        assert not re.search(rf"[ )]{name}(-start|-done)?\(", text), name
    assert set(re.findall(r'custom_call_target="([^"]*)"', text)) == {"TopK"}


# One state for all programs.


@pytest.mark.parametrize("unrolled", [True, False])
def test_programs_of_all_buckets_agree_on_trees_and_state(tiny_config: ModelConfig, unrolled: bool):
    built = tiny_programs(tiny_config, unrolled, 100)
    traces = [built.trace_step(bucket) for bucket in built.buckets.token_sizes]
    assert len(traces) > 1
    first = traces[0]
    for traced in traces:
        assert traced.in_tree == first.in_tree and traced.out_tree == first.out_tree
        after, output = traced.out_info
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(built.abstract_state)
        ]
        assert output.logits is None
    after, output = built.trace_step(16, score=True).out_info
    assert jax.tree.structure(after) == jax.tree.structure(first.out_info[0])
    assert output.logits.shape == (1, 16, tiny_config.vocab_size) and output.logits.dtype == np.float32
