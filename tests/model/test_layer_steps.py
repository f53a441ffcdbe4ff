"""Every step of every layer, fed with golden inputs: the table of golden/README.md, "How to compare", on prompt p3.

The steps run inside jit, several to a program, since that is where roundings get lost. Rows go through real pages, in
an order that is not the identity.
"""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.cache.pools import Pools, RowPool, abstract_pools, read_rows, write_rows
from rorqual.model.forward import (
    Inputs,
    Params,
    Program,
    add_memory,
    embed,
    empty_selection,
    engram_ids,
    graph_name,
    layer_leaves,
)
from rorqual.model.forward import logits as head_logits
from rorqual.model.kernels.cache_rows.reference import (
    pack_kv,
    pack_window,
    unpack_key,
    unpack_kv,
    unpack_window,
)
from rorqual.model.kernels.hyper_connections.reference import Mixes, narrow, widen
from rorqual.model.kernels.index_select.reference import index_scores
from rorqual.model.layers.block import Block, Hidden
from rorqual.model.layers.context import CacheState, Tables, Tokens, slots_of
from rorqual.model.layers.engram import ngram_rows
from rorqual.model.layers.indexer import Selection
from rorqual.model.layers.kinds import LayerNumbers, source_number
from rorqual.model.load import load_model
from rorqual.model.quantise import fp8_roundtrip
from rorqual.model.rope import angles, rotate

NUM_PAGES = 8
NUM_LAYERS = 8
SEAT = 1
KV_SOURCES = (2, 4, 5)
INDEX_SOURCES = (2, 4, 5, 7)

Goldens = dict[str, np.ndarray]
LAYERS = pytest.mark.parametrize("layer", range(NUM_LAYERS))


class Model(NamedTuple):
    params: Params
    program: Program
    layers: list[Any]

    def leaves(self, layer: int) -> Any:
        return self.layers[layer]

    def plain(self, layer: int) -> Any:
        """Leaves without compressor and indexer. Steps that need neither then compile once per ratio, or once."""
        leaves = self.leaves(layer)
        attn = {name: leaf for name, leaf in leaves["attn"].items() if name not in ("compressor", "indexer")}
        return {**leaves, "attn": attn}

    def plain_like(self, layer: int) -> int:
        """The first layer of the same ratio that has neither compressor nor indexer."""
        return {0: 0, 2: 3, 1: 6}[self.program.config.ratio(layer)]

    def same_kind(self, layer: int) -> int:
        """The first layer of the same kind."""
        return next(
            i for i in range(layer + 1) if self.program.segments[i].leader == self.program.segments[layer].leader
        )

    def block(self, layer: int, leaves: Any) -> Block:
        return self.program.part(graph_name(self.program.segments[layer].leader), leaves)

    def numbers(self, layer: int) -> LayerNumbers:
        return LayerNumbers(jnp.int32(layer), jnp.int32(source_number(self.program.config, layer)), jnp.int32(0))


@pytest.fixture(scope="module", params=["float32", pytest.param("packed", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tiny_dir: Path) -> Model:
    params, program = load_model(tiny_dir, storage=request.param, unrolled=True, progress=False)
    return Model(params, program, [layer_leaves(stack["leader"], jnp.int32(0)) for stack in params["layers"]])


@pytest.fixture(scope="module")
def steps(model: Model) -> "Steps":
    return Steps(model)


@pytest.fixture(scope="module")
def inputs(tiny: Goldens) -> Inputs:
    ids = tiny["p3.ids"]
    place = np.arange(len(ids))
    tokens = Tokens(
        jnp.asarray(ids),
        jnp.asarray(place, jnp.int32),
        jnp.full(len(ids), SEAT, jnp.int32),
        jnp.asarray(place > 0),
        jnp.asarray(place == len(ids) - 1),
        jnp.ones(len(ids), bool),
        jnp.zeros(len(ids), bool),
    )
    pages = np.random.default_rng(3).permuted(np.tile(np.arange(NUM_PAGES, dtype=np.int32), (2, 1)), axis=1)
    tables = Tables(jnp.asarray(pages), jnp.asarray(pages[:, ::-1]))
    return Inputs(tokens, tables, jnp.full((len(ids), 3), -1, jnp.int32))


def empty_state(program: Program) -> CacheState:
    shapes = abstract_pools(program.layout, NUM_PAGES, NUM_PAGES)
    pools = jax.tree.map(lambda s: jnp.full(s.shape, 0x5A5A5A5A, s.dtype), shapes)
    return CacheState(pools, jnp.zeros((2, 2, 2, program.layout.kv_dim)))


class Attended(NamedTuple):
    """What `attn_in` gives, all from one program."""

    q: jax.Array
    window_kv: jax.Array
    compressed_kv: jax.Array | None
    keys: jax.Array | None
    index_q: jax.Array | None
    index_weights: jax.Array | None
    chosen: Selection
    out: jax.Array


class GivenAttention:
    """Stands in a block where attention is, with a result that is known."""

    compressor = None

    def __init__(self, result: jax.Array):
        self.result = result

    def __call__(self, x, tokens, state, tables, numbers, chosen, carry):
        return self.result, state, chosen, carry


class Steps:
    """The jitted programs, compiled once per kind of layer and storage."""

    def __init__(self, model: Model):
        self.model = model
        self.attention = jax.jit(self._attention, static_argnums=0)
        self.core = jax.jit(self._core, static_argnums=0)
        self.mixing = jax.jit(self._mixing)
        self.before = jax.jit(self._before)
        self.projection = jax.jit(self._projection, static_argnums=0)
        self.output = jax.jit(self._output, static_argnums=0)
        self.experts = jax.jit(self._experts)
        self.widen = jax.jit(widen)
        self.wiring = jax.jit(self._wiring)
        self.memory = jax.jit(self._memory, static_argnums=0)
        self.end = jax.jit(self._end)

    def _attention(self, layer: int, leaves: Any, x, inputs: Inputs, state: CacheState, chosen: Selection, numbers):
        attn = self.model.block(layer, leaves).attn
        tokens, tables, layout = inputs.tokens, inputs.tables, attn.layout
        carry = attn.compressor.empty_carry() if attn.compressor is not None else None
        out, state, chosen, _ = attn(x, tokens, state, tables, numbers, chosen, carry)
        projected = attn.project(x, tokens.position)
        slots = slots_of(tables.window_pages, tokens.seat, tokens.position, layout.page_size)
        window = unpack_window(
            read_rows(state.pools.window, numbers.layer, slots, layout.window_row), layout.window_row
        )
        compressed = keys = index_q = index_weights = None
        if attn.compressor is not None:
            compressed, keys = self._source_rows(attn, state.pools, tables, numbers)
        if attn.indexer is not None:
            query = attn.indexer.query(x, projected.qr, *angles(tokens.position, attn.frequencies), tokens.position + 1)
            index_q, index_weights = query.q, query.w
        return Attended(projected.q, window, compressed, keys, index_q, index_weights, chosen, out), state

    @staticmethod
    def _source_rows(attn, pools: Pools, tables: Tables, numbers: LayerNumbers):
        layout, pool = attn.layout, pools.sources[attn.kind.pool]
        group = jnp.arange(40 // attn.kind.ratio, dtype=jnp.int32)
        rows_per_page = layout.groups[attn.kind.pool].rows_per_page
        slots = slots_of(tables.global_pages, jnp.full(group.shape, SEAT), group, rows_per_page)
        return (
            unpack_kv(read_rows(pool.kv, numbers.source, slots, layout.kv_row), layout.kv_row),
            unpack_key(read_rows(pool.key, numbers.source, slots, layout.key_row), layout.key_row),
        )

    def _core(self, layer: int, leaves: Any, q, window, compressed, picks, inputs: Inputs, numbers: LayerNumbers):
        """Golden rows into pages, then the attention over them."""
        attn = self.model.block(layer, leaves).attn
        tokens, tables, layout = inputs.tokens, inputs.tables, attn.layout
        pools = empty_state(self.model.program).pools
        slots = slots_of(tables.window_pages, tokens.seat, tokens.position, layout.page_size)
        filled = write_rows(pools.window, numbers.layer, slots, *pack_window(window, layout.window_row))
        pools = pools._replace(window=filled)
        if compressed is not None:
            pools = self._with_source(attn, pools, compressed, tables, numbers)
        return attn._attend(q, tokens, pools, tables, numbers, Selection(picks, None))

    @staticmethod
    def _with_source(attn, pools: Pools, compressed, tables: Tables, numbers: LayerNumbers) -> Pools:
        layout, place = attn.layout, attn.kind.pool
        group = jnp.arange(compressed.shape[0], dtype=jnp.int32)
        slots = slots_of(tables.global_pages, jnp.full(group.shape, SEAT), group, layout.groups[place].rows_per_page)
        sources = list(pools.sources)
        kv: RowPool = write_rows(sources[place].kv, numbers.source, slots, *pack_kv(compressed, layout.kv_row))
        sources[place] = sources[place]._replace(kv=kv)
        return pools._replace(sources=tuple(sources))

    def _mixing(self, leaves: Any, stream, mid):
        block = self.model.block(0, leaves)
        return block.hc_attn(stream), block.hc_ffn(mid)

    def _before(self, leaves: Any, stream, pre, mid, pre_mid, image):
        """Sublayer inputs; that of the experts as they use it, quantised, and the routing that goes with it."""
        block = self.model.block(0, leaves)
        routed = block.route(mid, pre_mid, image)
        return block.attn_norm(narrow(stream, pre)), block.ffn_norm(narrow(mid, pre_mid)), routed

    def _projection(self, layer: int, leaves: Any, core, back, position):
        attn = self.model.block(layer, leaves).attn
        cos, sin = angles(position, attn.frequencies)
        lora = attn.grouped_projection(back)
        return rotate(core, cos, -sin), lora, attn.wo_b(fp8_roundtrip(lora))

    def _output(self, layer: int, leaves: Any, core, position):
        return self.model.block(layer, leaves).attn.output(core, position)

    def _experts(self, leaves: Any, x, image):
        block = self.model.block(0, leaves)
        experts, weights = block.ffn.gate(x, image)
        quantised = fp8_roundtrip(x)
        return (
            experts,
            weights,
            block.ffn.combine(quantised, block.ffn.experts(quantised, experts, weights, jnp.int32(0), 8)),
        )

    def _wiring(self, leaves: Any, hidden: Hidden, attn_out, inputs: Inputs, state: CacheState):
        block = self.model.block(0, leaves)
        block.attn = GivenAttention(attn_out)
        chosen = empty_selection(hidden.pre.shape[0], block.config)
        tile = self.model.program.tiles
        return block(hidden, chosen, state, inputs.tokens, inputs.tables, self.model.numbers(0), tile)[0]

    def _memory(self, place: int, params: Params, hidden: Hidden, inputs: Inputs):
        program = self.model.program
        ids = engram_ids(params, inputs, program)
        engram = program.config.engram
        pad = params["engram"]["token_map"][engram.pad_id]
        rows = ngram_rows(ids, pad, program.hashes[place], engram.n_heads)
        return rows, add_memory(params, hidden, ids, inputs, place, program)

    def _end(self, params: Params, hidden: Hidden):
        collapsed = narrow(hidden.stream, hidden.pre)
        norm = self.model.program.part("norm", params["norm"])
        return (
            collapsed,
            norm(collapsed),
            head_logits(params, hidden, jnp.asarray(hidden.pre.shape[0]), self.model.program),
        )


@pytest.fixture(scope="module")
def attended(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens) -> list[Attended]:
    """Every layer's attention from its golden input; pages and selection pass from layer to layer."""
    state, chosen, results = empty_state(model.program), empty_selection(40, model.program.config), []
    for layer in range(NUM_LAYERS):
        x = tiny["p3.attn_in"][layer]
        numbers = model.numbers(layer)
        result, state = steps.attention(model.same_kind(layer), model.leaves(layer), x, inputs, state, chosen, numbers)
        chosen = result.chosen
        results.append(result)
    return results


def test_embedding(model: Model, inputs: Inputs, tiny: Goldens, rules: ModuleType):
    hidden = jax.jit(embed, static_argnums=2)(model.params, inputs, model.program.config)
    rules.check_equal_share("stream_in[0]", hidden.stream, tiny["p3.stream_in"][0], share=1)
    rules.check_same("pre_in[0]", hidden.pre, tiny["p3.pre_in"][0])


@pytest.mark.parametrize("place", [0, 1])
def test_engram_and_hand_over(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, place: int):
    layer = model.program.config.engram.layers[place]
    before = Hidden(tiny["p3.stream_out"][layer - 1], tiny["p3.pre_out"][layer - 1])
    rows, hidden = steps.memory(place, model.params, before, inputs)
    rules.check_same("ngram_rows", rows, tiny["p3.ngram_rows"][:, place])
    rules.check_equal_share(
        f"stream_in[{layer}]", hidden.stream, tiny["p3.stream_in"][layer], share=0.97, all_within_ulp=2
    )
    rules.check_same(f"pre_in[{layer}]", hidden.pre, tiny["p3.pre_in"][layer])


@LAYERS
def test_mixing(model: Model, steps: Steps, tiny: Goldens, rules: ModuleType, layer: int):
    results = steps.mixing(model.plain(layer), tiny["p3.stream_in"][layer], tiny["p3.stream_mid"][layer])
    for half, pre, mixes in zip(("attn", "ffn"), ("pre_mid", "pre_out"), results, strict=True):
        rules.check_relative(f"{pre}[{layer}]", mixes.pre, tiny[f"p3.{pre}"][layer], 1e-4)
        rules.check_relative(f"{half}_post[{layer}]", mixes.post, tiny[f"p3.{half}_post"][layer], 1e-4)
        rules.check_within(f"{half}_comb[{layer}]", mixes.comb, tiny[f"p3.{half}_comb"][layer], 1e-5)


@LAYERS
def test_sublayer_inputs(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, layer: int):
    names = ("stream_in", "pre_in", "stream_mid", "pre_mid")
    given = (tiny[f"p3.{name}"][layer] for name in names)
    attn_in, ffn_in, routed = steps.before(model.plain(layer), *given, inputs.tokens.image)
    rules.check_equal_share(f"attn_in[{layer}]", attn_in, tiny["p3.attn_in"][layer])
    rules.check_equal_share(f"ffn_in[{layer}]", ffn_in, tiny["p3.ffn_in"][layer])
    rules.check_equal_share(f"quantised ffn_in[{layer}]", routed.x, fp8_roundtrip(tiny["p3.ffn_in"][layer]))
    rules.check_same(f"experts[{layer}]", np.sort(routed.experts), np.sort(tiny["p3.experts"][layer]))


@LAYERS
def test_queries_and_rows(attended: list[Attended], tiny: Goldens, rules: ModuleType, layer: int):
    result = attended[layer]
    rules.check_equal_share(f"q[{layer}]", result.q, tiny["p3.q"][layer])
    rules.check_equal_share(f"window_kv[{layer}]", result.window_kv, tiny["p3.window_kv"][layer])
    assert (result.compressed_kv is not None) == (layer in KV_SOURCES)
    assert (result.index_q is not None) == (layer in INDEX_SOURCES)
    if layer in KV_SOURCES:
        rules.check_equal_share("compressed_kv", result.compressed_kv, tiny[f"p3.compressed_kv.layer{layer}"])
        rules.check_equal_share("index_keys", result.keys, tiny[f"p3.index_keys.layer{layer}"])
    if layer in INDEX_SOURCES:
        rules.check_equal_share("index_q", result.index_q, tiny[f"p3.index_q.layer{layer}"])
        rules.check_equal_share("index_weights", result.index_weights, tiny[f"p3.index_weights.layer{layer}"])


def golden_keys(tiny: Goldens, layer: int) -> np.ndarray:
    return tiny[f"p3.index_keys.layer{max(source for source in KV_SOURCES if source <= layer)}"]


@pytest.mark.parametrize("layer", INDEX_SOURCES)
def test_index_scores(tiny: Goldens, rules: ModuleType, layer: int):
    given = tiny[f"p3.index_q.layer{layer}"], golden_keys(tiny, layer), tiny[f"p3.index_weights.layer{layer}"]
    scores = jax.jit(index_scores)(*given)
    rules.check_equal_share(
        "index_scores", np.asarray(scores).astype(rules.BF16), tiny[f"p3.index_scores.layer{layer}"]
    )
    assert np.array_equal(np.asarray(scores).astype(rules.BF16).astype(np.float32), scores)


def _padded(picks: np.ndarray, width: int) -> np.ndarray:
    return np.pad(picks, ((0, 0), (0, width - picks.shape[1])), constant_values=-1)


@pytest.mark.parametrize("layer", range(2, NUM_LAYERS))
def test_selection(attended: list[Attended], tiny: Goldens, rules: ModuleType, layer: int):
    """Layers that are no index source keep the picks of the last one."""
    source = max(source for source in INDEX_SOURCES if source <= layer)
    picks = np.asarray(attended[layer].chosen.picks)
    rules.check_same(f"picks[{layer}]", picks, _padded(tiny[f"p3.picks.layer{source}"], picks.shape[1]))


def test_ties_decided_some_selection(tiny: Goldens):
    assert any(tiny[f"p3.ties.layer{layer}"].any() for layer in INDEX_SOURCES)


@pytest.mark.parametrize("layer", [5, 6, 7])
def test_candidates(model: Model, attended: list[Attended], tiny: Goldens, rules: ModuleType, layer: int):
    blocks = np.asarray(attended[layer].chosen.blocks)
    block_of = np.arange(40) // model.program.config.candidate_block_size
    inside = (blocks[:, :, None] == block_of).any(1)
    rules.check_same("candidates", inside, tiny["p3.candidates.layer5"] == 1)


@LAYERS
def test_attention_core(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, layer: int):
    compressed = picks = None
    if layer >= KV_SOURCES[0]:
        compressed = tiny[f"p3.compressed_kv.layer{max(source for source in KV_SOURCES if source <= layer)}"]
        picks = tiny[f"p3.picks.layer{max(source for source in INDEX_SOURCES if source <= layer)}"]
    rows = tiny["p3.q"][layer], tiny["p3.window_kv"][layer], compressed, picks
    core = steps.core(model.plain_like(layer), model.plain(layer), *rows, inputs, model.numbers(layer))
    rules.check_close_share(f"attn_core[{layer}]", core, tiny["p3.attn_core"][layer])


@LAYERS
def test_projection(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, layer: int):
    core, back, position = tiny["p3.attn_core"][layer], tiny["p3.attn_back"][layer], inputs.tokens.position
    turned, lora, out = steps.projection(model.plain_like(layer), model.plain(layer), core, back, position)
    rules.check_equal_share(f"attn_back[{layer}]", turned, back)
    rules.check_equal_share(f"wo_a_out[{layer}]", lora, tiny["p3.wo_a_out"][layer])
    rules.check_equal_share(f"attn_out[{layer}]", out, tiny["p3.attn_out"][layer])
    whole = steps.output(model.plain_like(layer), model.plain(layer), core, position)
    rules.check_equal_share(f"attn_out[{layer}] from the core", whole, tiny["p3.attn_out"][layer])


@LAYERS
def test_router_and_experts(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, layer: int):
    x = tiny["p3.ffn_in"][layer]
    experts, weights, out = steps.experts(model.plain(layer), x, inputs.tokens.image)
    order, golden_order = np.argsort(experts, 1), np.argsort(tiny["p3.experts"][layer], 1)
    rules.check_same(f"experts[{layer}]", np.sort(experts), np.sort(tiny["p3.experts"][layer]))
    golden_weights = np.take_along_axis(tiny["p3.expert_weights"][layer], golden_order, 1)
    rules.check_relative(f"weights[{layer}]", np.take_along_axis(np.asarray(weights), order, 1), golden_weights, 1e-5)
    rules.check_equal_share(f"ffn_out[{layer}]", out, tiny["p3.ffn_out"][layer])


@LAYERS
def test_widening(steps: Steps, tiny: Goldens, rules: ModuleType, layer: int):
    for half, before, after, pre in (
        ("attn", "stream_in", "stream_mid", "pre_mid"),
        ("ffn", "stream_mid", "stream_out", "pre_out"),
    ):
        mixes = Mixes(*(tiny[f"p3.{name}"][layer] for name in (pre, f"{half}_post", f"{half}_comb")))
        stream = steps.widen(tiny[f"p3.{half}_out"][layer], tiny[f"p3.{before}"][layer], mixes)
        rules.check_equal_share(f"{after}[{layer}]", stream, tiny[f"p3.{after}"][layer])


@LAYERS
def test_wiring(model: Model, steps: Steps, inputs: Inputs, tiny: Goldens, rules: ModuleType, layer: int):
    """A whole layer with the golden result where attention stands."""
    hidden = Hidden(tiny["p3.stream_in"][layer], tiny["p3.pre_in"][layer])
    given = tiny["p3.attn_out"][layer]
    result = steps.wiring(model.plain(layer), hidden, given, inputs, empty_state(model.program))
    rules.check_equal_share(f"wired stream_out[{layer}]", result.stream, tiny["p3.stream_out"][layer], share=0.98)
    rules.check_relative(f"wired pre_out[{layer}]", result.pre, tiny["p3.pre_out"][layer], 1e-3)


def test_end(model: Model, steps: Steps, tiny: Goldens, rules: ModuleType):
    collapsed, final, logits = steps.end(model.params, Hidden(tiny["p3.stream_out"][7], tiny["p3.pre_out"][7]))
    rules.check_equal_share("collapsed", collapsed, tiny["p3.collapsed"])
    rules.check_equal_share("final", final, tiny["p3.final"])
    rules.check_within("logits", logits, tiny["p3.logits"], 2e-3)
