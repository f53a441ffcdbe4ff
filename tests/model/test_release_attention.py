"""Attention and selection at the released sizes: position 1,048,575, needles, top 512 of 60,003 keys with ties.

Rows and keys lie in pages that are scattered over a real pool; only the pages a case touches exist.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rorqual.cache.layout import CacheLayout, RowLayout
from rorqual.cache.pools import Pools, RowPool, abstract_pools, pack_words, write_rows
from rorqual.model.config import ModelConfig, released_config
from rorqual.model.kernels.cache_rows.reference import pack_key, pack_window, row_bytes, unpack_key
from rorqual.model.kernels.index_select.reference import index_scores
from rorqual.model.layers.attention import Attention
from rorqual.model.layers.context import Tables, Tokens, slots_of
from rorqual.model.layers.indexer import Indexer, KeyPages, Query, Selection, select_from_all, select_from_blocks
from rorqual.model.layers.kinds import LayerNumbers, cache_layout, layer_kind, source_number
from rorqual.model.quantise import fp4_key_roundtrip, fp8_roundtrip
from rorqual.model.rope import angles, layer_frequencies, rotate

Goldens = dict[str, np.ndarray]
ATTENTION_CASES = ("attn0", "attn3", "attn21", "attn21end")
INDEX_CASES = ("index2", "index20", "index24")
STRANGE_WORD = 0x7F7F7F7F  # what untouched pages hold: large numbers, so that a foreign row shows
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return released_config()


@pytest.fixture(scope="module")
def layout(config: ModelConfig) -> CacheLayout:
    return cache_layout(config, with_draft=False)


def packed_codes(codes: np.ndarray, scales: np.ndarray, row: RowLayout) -> tuple[np.ndarray, np.ndarray]:
    """Stored bytes (two e2m1 a byte, even low) of rows -> their words."""
    if row.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    words = pack_words(jnp.asarray(codes, jnp.uint32), row.bits, row.data_words)
    return np.asarray(words), np.asarray(pack_words(jnp.asarray(scales, jnp.uint32), 8, row.scale_words))


def scattered_table(rows: np.ndarray, rows_per_page: int, num_pages: int) -> tuple[np.ndarray, int]:
    """A page table `[1, num_pages]` with places for the pages that `rows` touch, and how many; page 0 is nobody's."""
    touched = np.unique(rows // rows_per_page)
    table = np.zeros((1, num_pages), np.int32)
    table[0, touched] = np.random.default_rng(len(touched)).permutation(len(touched)) + 1
    return table, len(touched) + 1


def strange_pools(layout: CacheLayout, num_global: int, num_window: int) -> Pools:
    shapes = abstract_pools(layout, num_global, num_window)
    return jax.tree.map(lambda s: jnp.full(s.shape, STRANGE_WORD, s.dtype), shapes)


class Case(NamedTuple):
    """One attention case as the device sees it: static place in the model, then arrays."""

    layer: int
    position: np.ndarray
    tables: Tables
    pools: Pools
    picks: np.ndarray | None


def _source_pools(pools: Pools, place: int, kv: RowPool) -> Pools:
    sources = list(pools.sources)
    sources[place] = sources[place]._replace(kv=kv)
    return pools._replace(sources=tuple(sources))


def make_case(name: str, config: ModelConfig, layout: CacheLayout, judge: Any, release: Goldens, make: Any) -> Case:
    layer, position = judge.cases[name]["layer"], judge.cases[name]["position"]
    kind, num_pages = layer_kind(config, layer), config.max_context // layout.page_size
    window_positions = np.arange(position - 127, position + 1)
    window_table, num_window = scattered_table(window_positions, layout.page_size, num_pages)
    picks = release.get(f"{name}.picks")
    rows_per_page = layout.groups[kind.pool].rows_per_page
    global_table, num_global = scattered_table(
        np.array([], np.int32) if picks is None else picks, rows_per_page, num_pages
    )
    pools = strange_pools(layout, num_global, num_window)
    tables = Tables(jnp.asarray(global_table), jnp.asarray(window_table))
    seat = jnp.zeros(127, jnp.int32)
    slots = slots_of(tables.window_pages, seat, jnp.asarray(window_positions[:-1], jnp.int32), layout.page_size)
    window = make(f"cache.{name}.window.")
    rows = packed_codes(window["weight"], window["scale"], layout.window_row)
    pools = pools._replace(window=write_rows(pools.window, jnp.int32(layer), slots, *rows))
    if picks is not None:
        kv, source = make(f"cache.{name}.kv."), jnp.int32(source_number(config, layer))
        slots = slots_of(tables.global_pages, jnp.zeros(len(picks), jnp.int32), jnp.asarray(picks), rows_per_page)
        rows = packed_codes(kv["weight"], kv["scale"], layout.kv_row)
        pools = _source_pools(pools, kind.pool, write_rows(pools.sources[kind.pool].kv, source, slots, *rows))
    return Case(layer, np.array([position], np.int32), tables, pools, None if picks is None else picks[None])


def one_token(position: jax.Array) -> Tokens:
    yes, zero = jnp.ones(1, bool), jnp.zeros(1, jnp.int32)
    return Tokens(zero, position, zero, ~yes, yes, yes, ~yes)


class Stages(NamedTuple):
    """Golden inputs of the stages, each `[1, ...]`."""

    x: Any
    qr: Any
    q: Any
    kv_rotated: Any
    attn: Any
    attn_unrotated: Any
    o_lora: Any
    needle_q: Any


def attention_results(config: ModelConfig, layout: CacheLayout, layer: int) -> Any:
    """The jitted program: every stage from its golden input, and the whole sublayer from `x`."""
    kind = layer_kind(config, layer)
    numbers = LayerNumbers(jnp.int32(layer), jnp.int32(source_number(config, layer)), jnp.int32(0))

    def run(leaves: Any, given: Stages, position: Any, pools: Pools, tables: Tables, picks: Any) -> dict:
        attn, tokens = Attention(leaves, config, layout, kind), one_token(position)
        cos, sin = angles(position, attn.frequencies)
        chosen = Selection(picks, None)
        projected = attn.project(given.x, position)
        pools = attn._write_window(pools, given.kv_rotated, tokens, tables, numbers)
        whole = attn._attend(projected.q, tokens, pools, tables, numbers, chosen)
        qr = fp8_roundtrip(given.qr)
        return {
            "qr": attn.q_norm(attn.wq_a(fp8_roundtrip(given.x))),
            "q": rotate(attn.wq_b(qr).reshape(given.q.shape), cos, sin),
            "q end_to_end": projected.q,
            "kv_rotated": projected.kv,
            "kv_row": row_bytes(pack_window(given.kv_rotated, layout.window_row), layout.window_row),
            "attn": attn._attend(given.q, tokens, pools, tables, numbers, chosen),
            "needle_attn": attn._attend(given.needle_q, tokens, pools, tables, numbers, chosen),
            "attn_unrotated": rotate(given.attn, cos, -sin),
            "o_lora": attn.grouped_projection(given.attn_unrotated),
            "y stage": attn.wo_b(fp8_roundtrip(given.o_lora)),
            "y": attn.output(whole, position),
        }

    return jax.jit(run)


@pytest.fixture(scope="module")
def layer21(config: ModelConfig, layout: CacheLayout) -> Any:
    """One program for both positions of layer 21."""
    return attention_results(config, layout, 21)


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_sublayer(judge, weights, config, layout, layer21, release: Goldens, name: str):
    case = make_case(name, config, layout, judge, release, weights)
    program = layer21 if case.layer == 21 else attention_results(config, layout, case.layer)
    given = Stages(*(release[f"{name}.{stage}"][None] for stage in Stages._fields))
    leaves = weights(f"layers.{case.layer}.attn.")
    results = program(leaves, given, case.position, case.pools, case.tables, case.picks)
    for stage, result in results.items():
        stage, _, variant = stage.partition(" ")
        judge.check(f"{name}.{stage}", result[0], variant or None)


def test_needles_look_at_the_ends(release: Goldens):
    """The slots that a wrong page or an off-by-one would lose first are among those looked for."""
    assert {0, 1, 63, 64, 126, 127} <= set(release["attn0.needle_slot"].tolist())
    assert {128, 129, 191, 192, 638, 639} <= set(release["attn21end.needle_slot"].tolist())


class Keys(NamedTuple):
    """Index keys of a case in a pool, and the query's numbers."""

    pages: KeyPages
    visible: jax.Array
    position: jax.Array


def make_keys(name: str, config: ModelConfig, layout: CacheLayout, judge: Any, make: Any) -> Keys:
    case = judge.cases[name]
    kind, count = layer_kind(config, case["layer"]), case["keys"]
    rows_per_page = layout.groups[kind.pool].rows_per_page
    table, num_pages = scattered_table(np.arange(count), rows_per_page, -(-count // rows_per_page))
    keys = make(f"cache.{case['key_cache']}.keys.")
    rows = packed_codes(keys["weight"], keys["scale"], layout.key_row)
    source = jnp.int32(source_number(config, case["layer"]))
    slots = slots_of(jnp.asarray(table), jnp.zeros(count, jnp.int32), jnp.arange(count), rows_per_page)
    pool = write_rows(strange_pools(layout, num_pages, 1).sources[kind.pool].key, source, slots, *rows)
    pages = KeyPages(pool, source, jnp.asarray(table), jnp.zeros(1, jnp.int32), rows_per_page, layout)
    return Keys(pages, jnp.array([count]), jnp.array([case["position"]]))


def decoded_keys(make: Any, name: str, layout: CacheLayout) -> jax.Array:
    keys = make(f"cache.{name}.keys.")
    return unpack_key(packed_codes(keys["weight"], keys["scale"], layout.key_row), layout.key_row)


@pytest.mark.parametrize("name", INDEX_CASES)
def test_index_queries(judge, weights, config: ModelConfig, layout: CacheLayout, release: Goldens, name: str):
    case, row = judge.cases[name], layout.key_row

    @jax.jit
    def run(leaves: Any, x: jax.Array, qr: jax.Array, rotated: jax.Array) -> tuple:
        indexer = Indexer(leaves, config)
        cos, sin = angles(jnp.array([case["position"]]), layer_frequencies(config, True))
        queries = indexer.rotated_queries(fp8_roundtrip(qr), cos, sin)
        return queries[0], indexer.head_weights(x)[0], row_bytes(pack_key(rotated, row), row)

    given = release[f"{name}.x"][None], release[f"{name}.qr"][None], release[f"{name}.q_rotated"]
    queries, head_weights, stored = run(weights(f"layers.{case['layer']}.attn.indexer."), *given)
    judge.check(f"{name}.q_rotated", queries)
    judge.check(f"{name}.head_weight", head_weights)
    judge.check(f"{name}.q_codes", stored[:, :64])
    judge.check(f"{name}.q_scales", stored[:, 64:])


def golden_query(release: Goldens, name: str, visible: jax.Array) -> Query:
    q = fp4_key_roundtrip(jnp.asarray(release[f"{name}.q_rotated"]))
    return Query(q[None], jnp.asarray(release[f"{name}.head_weight"])[None], visible)


@pytest.mark.parametrize("name", INDEX_CASES)
def test_index_scores_of_all_keys(judge, weights, layout: CacheLayout, release: Goldens, name: str):
    query = golden_query(release, name, jnp.array([0]))
    keys = decoded_keys(weights, judge.cases[name]["key_cache"], layout)
    scores = np.asarray(jax.jit(index_scores)(query.q, keys, query.w))[0]
    judge.check(f"{name}.scores", scores.astype(BF16))
    assert np.array_equal(scores, scores.astype(BF16).astype(np.float32))


def select(name: str, query: Query, keys: Keys, config: ModelConfig, release: Goldens) -> Selection:
    """The paged selection as the case's layer makes it."""
    pool, *rest = keys.pages
    if name == "index24":
        blocks = jnp.asarray(release["index20.candidate_blocks"])[None]
        run = jax.jit(lambda q, pool: select_from_blocks(q, KeyPages(pool, *rest), config, blocks))
        return Selection(run(query, pool), blocks)
    make_blocks = name == "index20"
    return jax.jit(lambda q, pool: select_from_all(q, KeyPages(pool, *rest), config, make_blocks))(query, pool)


@pytest.mark.parametrize("name", INDEX_CASES)
def test_selection_through_pages(judge, weights, config, layout, release: Goldens, name: str):
    keys = make_keys(name, config, layout, judge, weights)
    chosen = select(name, golden_query(release, name, keys.visible), keys, config, release)
    judge.check(f"{name}.picks", chosen.picks[0])
    if name == "index20":
        judge.check("index20.candidate_blocks", chosen.blocks[0])
    taken = np.intersect1d(chosen.picks[0], release[f"{name}.tied_positions"])
    assert len(taken) == release[f"{name}.cut_counts"][2] < len(release[f"{name}.tied_positions"])
    assert np.array_equal(taken, release[f"{name}.tied_positions"][: len(taken)]), "ties go to the lower position"


@pytest.mark.parametrize("name", INDEX_CASES)
def test_selection_from_the_sublayer_input(judge, weights, config, layout, release: Goldens, name: str):
    """From `x` and `qr`: a flipped code may exchange picks within two bf16 steps of the cut, and no others."""
    keys = make_keys(name, config, layout, judge, weights)
    leaves = weights(f"layers.{judge.cases[name]['layer']}.attn.indexer.")

    @jax.jit
    def make_query(leaves: Any, x: jax.Array, qr: jax.Array) -> Query:
        cos, sin = angles(keys.position, layer_frequencies(config, True))
        return Indexer(leaves, config).query(x, fp8_roundtrip(qr), cos, sin, keys.visible)

    query = make_query(leaves, release[f"{name}.x"][None], release[f"{name}.qr"][None])
    picks = np.asarray(select(name, query, keys, config, release).picks[0])
    exchanged = np.setxor1d(picks, release[f"{name}.picks"])
    cut = float(release[f"{name}.cut"][0])
    step = 2.0 ** (np.floor(np.log2(abs(cut))) - 7)
    print(f"{name}: {len(exchanged)} positions exchanged")
    assert np.all(np.abs(release[f"{name}.scores"][exchanged].astype(np.float32) - cut) <= 2 * step)
