"""Single operators against the goldens of the published reference, at small sizes; every program runs inside jit.

Rules: codes, scales, masks, experts and rows equal; bf16 results 97 % equal and all within 2 ulp, unless the list in
golden/README.md says otherwise.
"""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model import quantise
from rorqual.model.config import ModelConfig, YarnConfig, read_config
from rorqual.model.kernels.grouped_experts.reference import expert_tile, grouped_experts
from rorqual.model.kernels.hyper_connections.reference import Mixes, mixing_logits, narrow, split_mixes, widen
from rorqual.model.kernels.index_select.reference import (
    best_mask,
    compact,
    index_scores,
    merge_best,
    merge_blocks,
    no_selection,
)
from rorqual.model.kernels.sparse_attention.reference import attend
from rorqual.model.layers.compressor import Compressor
from rorqual.model.layers.context import Tokens
from rorqual.model.layers.engram import Engram
from rorqual.model.layers.experts import Router, SharedExpert
from rorqual.model.layers.indexer import Indexer
from rorqual.model.layers.linear import Fp8Linear, RMSNorm, unpack_fp4, unpack_fp8
from rorqual.model.numerics import bf16, dot
from rorqual.model.quantise import fp8_roundtrip
from rorqual.model.rope import angles, inverse_frequencies, layer_frequencies, rotate

Goldens = dict[str, np.ndarray]
RELEASED_YARN = YarnConfig(16, 65536, 32, 1)


@pytest.fixture(scope="module")
def config(tiny_dir: Path) -> ModelConfig:
    return read_config(tiny_dir)


def stored(ops: Goldens, prefix: str) -> Any:
    """Tensors below a prefix as packed leaves: 8-bit kinds as their codes."""
    tree: dict[str, Any] = {}
    for name, value in ops.items():
        if name.startswith(prefix + "."):
            *path, last = name[len(prefix) + 1 :].split(".")
            branch = tree
            for key in path:
                branch = branch.setdefault(key, {})
            branch[last] = value.view(np.uint8) if value.dtype.itemsize == 1 else value
    return tree


def packed_nibbles(values: jax.Array) -> np.ndarray:
    codes = np.asarray(quantise.e2m1_codes(values)).reshape(values.shape[0], -1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@pytest.mark.parametrize("case", ["act_quant", "act_quant_sweep"])
def test_fp8_quantisation(ops: Goldens, rules: ModuleType, case: str):
    x = ops[f"{case}.x"]
    values, exponent = jax.jit(quantise.fp8_groups)(x)
    codes = np.asarray(quantise.e4m3_codes(values)).reshape(x.shape)
    rules.check_same(f"{case}.values", codes, ops[f"{case}.values"].view(np.uint8))
    rules.check_same(f"{case}.scales", quantise.e8m0_codes(exponent), ops[f"{case}.scales"].view(np.uint8))
    if f"{case}.roundtrip" in ops:
        rules.check_same(f"{case}.roundtrip", jax.jit(fp8_roundtrip)(x), ops[f"{case}.roundtrip"])


@pytest.mark.parametrize("case", ["fp4_act_quant", "fp4_sweep"])
@pytest.mark.parametrize("scale_format", ["e8m0", "e4m3"])
def test_fp4_quantisation(ops: Goldens, rules: ModuleType, case: str, scale_format: str):
    x, name = ops[f"{case}.x"], f"{case}.{scale_format}"
    if scale_format == "e8m0":
        values, exponent = jax.jit(quantise.fp4_key_groups)(x)
        scales, roundtrip = quantise.e8m0_codes(exponent), jax.jit(quantise.fp4_key_roundtrip)(x)
    else:
        values, scale = jax.jit(quantise.fp4_kv_groups)(x)
        scales, roundtrip = quantise.e4m3_codes(scale), jax.jit(quantise.fp4_kv_roundtrip)(x)
    rules.check_same(f"{name}.scales", scales, ops[f"{name}.scales"].view(np.uint8))
    rules.check_same(f"{name}.roundtrip", roundtrip, ops[f"{name}.roundtrip"])
    if f"{name}.packed" in ops:
        rules.check_same(f"{name}.packed", packed_nibbles(values), ops[f"{name}.packed"])


def test_fp8_product(ops: Goldens, rules: ModuleType):
    """The last tile row is partial; the input is quantised first."""
    run = jax.jit(lambda leaves, x: Fp8Linear(leaves)(fp8_roundtrip(x)))
    leaves = {"weight": ops["fp8_gemm.weight"].view(np.uint8), "scale": ops["fp8_gemm.weight_scale"].view(np.uint8)}
    rules.check_equal_share("fp8_gemm", run(leaves, ops["fp8_gemm.x"]), ops["fp8_gemm.y"], all_within_ulp=2)
    values, _ = jax.jit(quantise.fp8_groups)(ops["fp8_gemm.x"])
    codes = np.asarray(quantise.e4m3_codes(values)).reshape(ops["fp8_gemm.x"].shape)
    rules.check_same("fp8_gemm.x_values", codes, ops["fp8_gemm.x_values"].view(np.uint8))


def test_fp4_product(ops: Goldens, rules: ModuleType):
    codes, scale = ops["fp4_gemm.weight"].view(np.uint8), ops["fp4_gemm.weight_scale"].view(np.uint8)
    weight = jax.jit(unpack_fp4)(codes, scale)
    rules.check_same("fp4_gemm.weight_decoded", weight.astype(jnp.float32), ops["fp4_gemm.weight_decoded"])
    y = jax.jit(lambda codes, scale, x: bf16(dot(fp8_roundtrip(x), unpack_fp4(codes, scale))))
    rules.check_equal_share("fp4_gemm", y(codes, scale, ops["fp4_gemm.x"]), ops["fp4_gemm.y"], all_within_ulp=2)


def test_attention_over_listed_rows(ops: Goldens, rules: ModuleType):
    slots = ops["sparse_attn.slots"]
    bank = ops["sparse_attn.kv"][np.maximum(slots, 0)]
    y = jax.jit(attend)(ops["sparse_attn.q"], bank, slots >= 0, ops["sparse_attn.sink"])
    rules.check_close_share("sparse_attn", y, ops["sparse_attn.y"])
    assert not np.any(y[0]), "query 0 has no row at all"


def test_attention_ignores_what_absent_rows_hold(ops: Goldens):
    slots = ops["sparse_attn.slots"]
    bank = ops["sparse_attn.kv"][np.maximum(slots, 0)]
    foreign = np.where((slots >= 0)[..., None], bank, np.array(np.nan, bank.dtype))
    run, rest = jax.jit(attend), (slots >= 0, ops["sparse_attn.sink"])
    assert np.array_equal(run(ops["sparse_attn.q"], bank, *rest), run(ops["sparse_attn.q"], foreign, *rest))


def test_sinkhorn(ops: Goldens, rules: ModuleType):
    given = (ops[f"hc_split_sinkhorn.{name}"] for name in ("mixes", "scale", "base"))
    mixes = jax.jit(split_mixes, static_argnums=(3, 4))(*given, 20, 1e-6)
    rules.check_relative("pre", mixes.pre, ops["hc_split_sinkhorn.pre"], 1e-4)
    rules.check_relative("post", mixes.post, ops["hc_split_sinkhorn.post"], 1e-4)
    rules.check_within("comb", mixes.comb, ops["hc_split_sinkhorn.comb"], 1e-5)


@pytest.mark.parametrize(("name", "base", "yarn"), [("window", 10000, None), ("compressed", 160000, RELEASED_YARN)])
def test_rope(ops: Goldens, rules: ModuleType, name: str, base: int, yarn: YarnConfig | None):
    frequencies = inverse_frequencies(base, 64, yarn)
    rules.check_same("inv_freq", frequencies, ops[f"rope.{name}.inv_freq"])

    @jax.jit
    def run(position: jax.Array, x: jax.Array, y: jax.Array) -> tuple:
        cos, sin = angles(position, frequencies)
        return cos, sin, rotate(x, cos, sin), rotate(y, cos, -sin)

    cos, sin, y, back = run(*(ops[f"rope.{name}.{part}"] for part in ("positions", "x", "y")))
    rules.check_within("cos", cos, ops[f"rope.{name}.cos"], 2e-7)
    rules.check_within("sin", sin, ops[f"rope.{name}.sin"], 2e-7)
    rules.check_equal_share("y", y, ops[f"rope.{name}.y"], all_within_ulp=2)
    rules.check_equal_share("back", back, ops[f"rope.{name}.back"], all_within_ulp=2)


@pytest.mark.parametrize(("count", "size"), [(3, 4), (2, 1), (10, 4), (2, 8)])
@pytest.mark.parametrize("chunk_blocks", [1, 2, 99])
def test_candidate_blocks(ops: Goldens, rules: ModuleType, count: int, size: int, chunk_blocks: int):
    """The same blocks whether the scores come in one piece or block by block."""
    scores, visible = ops["candidate_blocks.scores"].astype(np.float32), ops["candidate_blocks.visible"]
    groups = scores.shape[1]
    padded = np.full((len(scores), -(-groups // size) * size), -np.inf, np.float32)
    padded[:, :groups] = np.where(np.arange(groups) < visible[:, None], scores, -np.inf)
    best, width = no_selection(len(scores), count), min(chunk_blocks * size, padded.shape[1])
    merge = jax.jit(merge_blocks, static_argnums=4)
    for first in range(0, padded.shape[1], width):
        best = merge(best, padded[:, first : first + width], jnp.int32(first), visible, size)
    inside = (np.asarray(best[1])[:, :, None] == np.arange(groups) // size).any(1)
    rules.check_same(f"mask_{count}x{size}", inside, ops[f"candidate_blocks.mask_{count}x{size}"] == 1)


def sorted_by_expert(experts: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(experts, 1)
    return np.take_along_axis(np.asarray(experts), order, 1), np.take_along_axis(np.asarray(weights), order, 1)


@pytest.mark.parametrize("case", ["text", "mixed"])
def test_router(ops: Goldens, config: ModelConfig, rules: ModuleType, case: str):
    leaves = {name: ops[f"gate.{name}"] for name in ("weight", "bias", "bias_vl")}
    image = (ops["gate.image_mask"] == 1) & (case == "mixed")
    found = sorted_by_expert(*jax.jit(lambda w, x, image: Router(w, config)(x, image))(leaves, ops["gate.x"], image))
    golden = sorted_by_expert(ops[f"gate.{case}.experts"], ops[f"gate.{case}.weights"])
    rules.check_same("experts", found[0], golden[0])
    rules.check_relative("weights", found[1], golden[1], 1e-5)


def test_router_ties_go_to_the_lower_expert(ops: Goldens, config: ModelConfig, rules: ModuleType):
    golden = ops["gate.tie.experts"]
    leaves = {"weight": ops["gate.weight"], "bias": np.zeros(8, np.float32), "bias_vl": np.zeros(8, np.float32)}
    x = np.zeros((len(golden), config.dim), ops["gate.x"].dtype)
    experts, weights = jax.jit(lambda w, x: Router(w, config)(x, jnp.zeros(len(golden), bool)))(leaves, x)
    rules.check_same("experts", experts, golden)
    rules.check_relative("weights", weights, ops["gate.tie.weights"], 1e-5)


@pytest.mark.parametrize("ratio", [2, 1])
def test_compressor(ops: Goldens, config: ModelConfig, rules: ModuleType, ratio: int):
    """Rotated with the frequencies of a layer that reads compressed rows; each stage from the golden latent."""
    name, leaves = f"compressor.ratio{ratio}", stored(ops, f"compressor.ratio{ratio}")
    x, latent = ops[f"{name}.x"], ops[f"{name}.latent"]
    indexer_leaves = {
        **leaves["indexer"],
        "wq_b": {"weight": np.zeros((1, 32), np.uint8)},
        "weights_proj": {"weight": np.zeros((1, 32), x.dtype)},
    }

    @jax.jit
    def run(leaves: Any, indexer_leaves: Any, x: jax.Array, latent: jax.Array) -> tuple:
        compressor, indexer = Compressor(leaves, config, ratio), Indexer(indexer_leaves, config)
        place, zero = jnp.arange(x.shape[0], dtype=jnp.int32), jnp.zeros(x.shape[0], jnp.int32)
        yes = zero == 0
        tokens = Tokens(zero, place, zero, place > 0, place == x.shape[0] - 1, yes, ~yes)
        pairs = jnp.zeros((1, 1, 2, latent.shape[1]))
        made = compressor.latents(x, tokens, pairs, jnp.int32(0), compressor.empty_carry())[0]
        cos, sin = angles(jnp.arange(latent.shape[0]) * ratio, layer_frequencies(config, True))
        keys = quantise.fp4_key_roundtrip(indexer.keys(latent, cos, sin))
        return made, quantise.fp4_kv_roundtrip(rotate(latent, cos, sin)), keys

    made, kv, keys = run({key: leaves[key] for key in leaves if key != "indexer"}, indexer_leaves, x, latent)
    rules.check_equal_share("latent", made[ratio - 1 :: ratio], latent, all_within_ulp=2)
    rules.check_equal_share("stored_kv", kv, ops[f"{name}.stored_kv"])
    rules.check_equal_share("index_keys", keys, ops[f"{name}.index_keys"])


def engram_leaves(ops: Goldens, weights_of: str) -> Any:
    leaves = {part: stored(ops, f"engram.{part}") for part in ("embed", "wkv")}
    return {**leaves, "q_weight": ops[f"{weights_of}.q_weight"], "k_weight": ops[f"{weights_of}.k_weight"]}


def test_engram_addition(ops: Goldens, config: ModelConfig, rules: ModuleType):
    run = jax.jit(lambda w, stream, rows, text: (e := Engram(w, config))(stream, e.embed(rows), text))
    text = ops["engram.text_mask"] == 1
    y = run(engram_leaves(ops, "engram"), ops["engram.stream"], ops["engram.rows"][:, 0], text)
    rules.check_equal_share("engram", y, ops["engram.y"], all_within_ulp=2)
    rules.check_same("image tokens", y[~text], ops["engram.stream"][~text])


def test_engram_stages(ops: Goldens, config: ModelConfig, rules: ModuleType):
    """Streams down to 1e-5 and 0, weights of either sign, an image token."""

    @jax.jit
    def run(leaves: Any, stream: jax.Array, rows: jax.Array, text: jax.Array, table: jax.Array, kv: jax.Array) -> tuple:
        engram = Engram(leaves, config)
        keys = kv.reshape(stream.shape[0], config.hc_mult + 1, config.dim)[:, :-1]
        gate = jnp.where(text[:, None], engram.gate(stream, keys), 0)
        return engram.embed(rows), engram.wkv(fp8_roundtrip(table)), gate, engram(stream, table, text)

    text = ops["engram2.text_mask"] == 1
    given = ops["engram2.stream"], ops["engram2.rows"][:, 0], text, ops["engram2.table"], ops["engram2.kv"]
    table, kv, gate, y = run(engram_leaves(ops, "engram2"), *given)
    rules.check_same("table", table, ops["engram2.table"])
    rules.check_equal_share("kv", kv, ops["engram2.kv"], all_within_ulp=2)
    rules.check_within("gate", gate, ops["engram2.gate"], 1e-4)
    for row in range(len(text)):
        rules.check_equal_share(f"y[{row}]", y[row], ops["engram2.y"][row])


def test_routed_expert(ops: Goldens, rules: ModuleType):
    """Rows 2 and 3 reach the limit of 10."""

    @jax.jit
    def run(leaves: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        w1, w2, w3 = (unpack_fp4(leaves[name]["weight"], leaves[name]["scale"]) for name in ("w1", "w2", "w3"))
        return expert_tile(fp8_roundtrip(x), weight, w1, w2, w3, 10.0)

    leaves = {name: stored(ops, f"expert.{name}") for name in ("w1", "w2", "w3")}
    y = run(leaves, ops["expert.x"], ops["expert.weights"].astype(np.float32))
    rules.check_equal_share("expert", y, ops["expert.y"])


def test_shared_expert(ops: Goldens, config: ModelConfig, rules: ModuleType):
    @jax.jit
    def run(leaves: Any, x: jax.Array) -> tuple:
        expert, quantised = SharedExpert(leaves, config), fp8_roundtrip(x)
        return expert.w1(quantised), expert.w3(quantised), expert(quantised)

    leaves = {name: stored(ops, f"shared_expert.{name}") for name in ("w1", "w2", "w3")}
    gate, up, y = run(leaves, ops["shared_expert.x"])
    rules.check_equal_share("gate", gate, ops["shared_expert.gate"], all_within_ulp=2)
    rules.check_equal_share("up", up, ops["shared_expert.up"], all_within_ulp=2)
    nearly_zero = [1, 3, 4, 7]
    rest = [row for row in range(len(y)) if row not in nearly_zero]
    assert np.all(np.abs(np.asarray(y)[nearly_zero].astype(np.float32)) < 1e-5)
    rules.check_equal_share("y", np.asarray(y)[rest], ops["shared_expert.y"][rest])


def test_experts_are_grouped_without_mixing(ops: Goldens):
    """Every pair gets its own expert's result, whatever the tile; a pair without an expert gets zeros."""
    rng = np.random.default_rng(0)
    x = fp8_roundtrip(jnp.asarray(rng.standard_normal((13, 32)), jnp.bfloat16))
    matrices = [rng.standard_normal(shape).astype(x.dtype) for shape in ((5, 64, 32), (5, 32, 64), (5, 64, 32))]
    experts = rng.integers(0, 6, (13, 2)).astype(np.int32)
    weights = rng.uniform(0.1, 1, (13, 2)).astype(np.float32)
    one = jax.jit(lambda x, weight, *w: expert_tile(x, weight, *w, 10.0))
    for tile in (1, 4, 64):
        run = jax.jit(
            lambda x, e, w, m, tile=tile: grouped_experts(
                x, e, w, lambda i: tuple(part[i] for part in m), 5, tile, 10.0
            )
        )
        y = np.asarray(run(x, experts, weights, [jnp.asarray(m) for m in matrices]))
        for token, slot in np.ndindex(13, 2):
            expert = experts[token, slot]
            if expert == 5:
                assert not np.any(y[token, slot])
                continue
            given = x[token : token + 1], weights[token, slot].reshape(1, 1)
            want = np.asarray(one(*given, *(m[expert] for m in matrices)))[0].astype(np.float32)
            assert np.allclose(y[token, slot].astype(np.float32), want, rtol=2e-2, atol=2e-2)


def test_rms_norm(ops: Goldens, rules: ModuleType):
    run = jax.jit(lambda weight, x: RMSNorm({"weight": weight}, 1e-20)(x))
    y = run(ops["rms_norm.weight"], ops["rms_norm.x"])
    rules.check_equal_share("rms_norm", y, ops["rms_norm.y"], all_within_ulp=2)


def test_hyper_connections(ops: Goldens, config: ModelConfig, rules: ModuleType):
    """Copies of unequal size, rows with very large and very small streams."""

    @jax.jit
    def run(leaves: dict, norm: jax.Array, stream: jax.Array, pre_in: jax.Array, y: jax.Array, golden: Mixes) -> tuple:
        z = mixing_logits(stream, leaves["fn"], config.norm_eps)
        x = narrow(stream, pre_in)
        mixes = split_mixes(z, leaves["scale"], leaves["base"], 20, 1e-6)
        return mixes, x, RMSNorm({"weight": norm}, 1e-20)(x), widen(y, stream, golden)

    leaves = {name: ops[f"mhc.{name}"] for name in ("fn", "scale", "base")}
    golden = Mixes(*(ops[f"mhc.{name}"] for name in ("pre", "post", "comb")))
    rest = (ops[f"mhc.{name}"] for name in ("norm_weight", "stream", "pre_in", "y"))
    mixes, x, normed, widened = run(leaves, *rest, golden)
    rules.check_relative("pre", mixes.pre, golden.pre, 1e-4)
    rules.check_relative("post", mixes.post, golden.post, 1e-4)
    rules.check_within("comb", mixes.comb, golden.comb, 1e-5)
    rules.check_equal_share("x", x, ops["mhc.x"], all_within_ulp=2)
    rules.check_equal_share("x_normed", normed, ops["mhc.x_normed"], all_within_ulp=2)
    rules.check_equal_share("stream_out", widened, ops["mhc.stream_out"], all_within_ulp=2)


def test_index_weights_and_scores(ops: Goldens, config: ModelConfig, rules: ModuleType):
    released_heads = dataclasses.replace(config, index_n_heads=32, index_head_dim=128)
    # weights_proj as the identity: what it projects is given, only the factor and its rounding are left.
    leaves = {
        "wq_b": {"weight": np.zeros((1, 32), np.uint8)},
        "weights_proj": {"weight": np.eye(32, dtype=ops["index.projected"].dtype)},
    }
    weights = jax.jit(lambda leaves, x: Indexer(leaves, released_heads).head_weights(x))(leaves, ops["index.projected"])
    rules.check_same("weights", weights, ops["index.weights"])
    scores = np.asarray(jax.jit(index_scores)(ops["index.q"], ops["index.keys"], ops["index.weights"]))
    golden = ops["index.scores"].astype(np.float32)
    assert np.mean(scores == golden) >= 0.97
    assert np.all(np.abs(scores - golden) <= 2.0 ** (np.floor(np.log2(np.maximum(np.abs(golden), 1e-30))) - 7))


@pytest.mark.parametrize("chunk", [1, 5, 16, 48])
def test_index_selection_with_ties(ops: Goldens, rules: ModuleType, chunk: int):
    """Every score occurs twice; the pick is the same whether scores come at once or in chunks."""
    scores, visible = ops["index.scores"].astype(np.float32), ops["index.visible"]
    scores = np.where(np.arange(48) < visible[:, None], scores, -np.inf)
    picks = np.asarray(compact(best_mask(jnp.asarray(scores), 7), 7))
    rules.check_same("picks", np.where(picks < 48, picks, -1), ops["index.picks"])
    best, merge = no_selection(len(scores), 7), jax.jit(merge_best)
    for first in range(0, 48, chunk):
        part = scores[:, first : first + chunk]
        positions = np.broadcast_to(np.arange(first, first + part.shape[1], dtype=np.int32), part.shape)
        best = merge(best, part, positions)
    rules.check_same("picks in chunks", best[1], ops["index.picks"])
    assert ops["index.ties"].any()


def test_fp8_weights_decode_exactly(ops: Goldens):
    codes, scale = ops["fp8_gemm.weight"], ops["fp8_gemm.weight_scale"].astype(np.float64)
    rows, columns = np.indices(codes.shape) // 32
    want = codes.astype(np.float64) * scale[rows, columns]
    assert np.array_equal(
        np.asarray(unpack_fp8(codes.view(np.uint8), ops["fp8_gemm.weight_scale"].view(np.uint8))).astype(np.float64),
        want,
    )
