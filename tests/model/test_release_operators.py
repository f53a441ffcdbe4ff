"""Operators at the released sizes, with weights by rule, against release_goldens and the tolerances stored in it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.model import quantise
from rorqual.model.config import ModelConfig, released_config
from rorqual.model.kernels.cache_rows.reference import pack_key, pack_kv, pack_window, row_bytes
from rorqual.model.kernels.grouped_experts.reference import expert_tile, swiglu
from rorqual.model.kernels.hyper_connections.reference import Mixes, mixing_logits, narrow, split_mixes, widen
from rorqual.model.layers.compressor import Compressor
from rorqual.model.layers.context import Tokens
from rorqual.model.layers.engram import Engram
from rorqual.model.layers.experts import Experts, Router, SharedExpert
from rorqual.model.layers.indexer import Indexer
from rorqual.model.layers.kinds import cache_layout
from rorqual.model.layers.linear import Fp8Linear, RMSNorm, unpack_fp4
from rorqual.model.numerics import bf16, dot
from rorqual.model.quantise import fp8_roundtrip
from rorqual.model.rope import angles, layer_frequencies, rotate

Goldens = dict[str, np.ndarray]
Weights = Callable[[str], Any]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return released_config()


def both_nibbles(codes: jax.Array) -> jax.Array:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@pytest.mark.parametrize("compressed", [False, True])
def test_rope_up_to_a_million_positions(judge, config: ModelConfig, release: Goldens, compressed: bool):
    name, frequencies = "compressed" if compressed else "window", layer_frequencies(config, compressed)
    judge.check(f"rope.{name}.inv_freq", frequencies)
    cos, sin = jax.jit(lambda position: angles(position, frequencies))(release["rope.positions"])
    judge.check(f"rope.{name}.cos", cos)
    judge.check(f"rope.{name}.sin", sin)


@pytest.mark.parametrize("width", [512, 1280, 2304, 5120, 6144, 8192, 15360])
def test_fp8_inputs(judge, release: Goldens, width: int):
    values, exponent = jax.jit(quantise.fp8_groups)(release[f"quant.fp8_{width}.x"])
    codes = quantise.e4m3_codes(values)
    judge.check(f"quant.fp8_{width}.values", codes.reshape(codes.shape[0], -1))
    judge.check(f"quant.fp8_{width}.scales", quantise.e8m0_codes(exponent))


def test_fp4_compressed_rows(judge, release: Goldens):
    values, scale = jax.jit(quantise.fp4_kv_groups)(release["quant.kv.x"])
    codes = quantise.e2m1_codes(values)
    judge.check("quant.kv.packed", both_nibbles(codes.reshape(codes.shape[0], -1)))
    judge.check("quant.kv.scales", quantise.e4m3_codes(scale))


@pytest.mark.parametrize("kind", ["keys", "queries"])
def test_fp4_keys_and_queries(judge, release: Goldens, kind: str):
    values, exponent = jax.jit(quantise.fp4_key_groups)(release[f"quant.{kind}.x"])
    codes = quantise.e2m1_codes(values)
    judge.check(f"quant.{kind}.packed", both_nibbles(codes.reshape(codes.shape[0], -1)))
    judge.check(f"quant.{kind}.scales", quantise.e8m0_codes(exponent))


@jax.jit
def run_expert(x: jax.Array, weight: jax.Array, expert: dict) -> tuple[jax.Array, ...]:
    """One packed expert: results of w1 and w3, and of the whole."""
    w1, w2, w3 = (unpack_fp4(expert[name]["weight"], expert[name]["scale"]) for name in ("w1", "w2", "w3"))
    x = fp8_roundtrip(x)
    return bf16(dot(x, w1)), bf16(dot(x, w3)), expert_tile(x, weight, w1, w2, w3, 10.0)


@pytest.mark.parametrize("number", [7, 200, 383])
def test_routed_expert(judge, weights: Weights, config: ModelConfig, release: Goldens, number: int):
    expert = weights(f"layers.5.ffn.experts.{number}.")
    gate, up, y = run_expert(release["expert.x"], release["expert.weights"], expert)
    judge.check(f"expert.{number}.y", y)
    if number == 7:
        judge.check("expert.7.w1", gate)
        judge.check("expert.7.w3", up)
        stages = (release[f"expert.7.{name}"].astype(np.float32) for name in ("w1", "w3"))
        hidden = jax.jit(lambda w, a, b: bf16(w * swiglu(a, b, config.swiglu_limit)))
        judge.check("expert.7.hidden", hidden(release["expert.weights"], *stages))


def test_shared_expert(judge, weights: Weights, config: ModelConfig, release: Goldens):
    run = jax.jit(lambda leaves, x: SharedExpert(leaves, config)(fp8_roundtrip(x)))
    judge.check("shared_expert.y", run(weights("layers.5.ffn.shared_experts."), release["expert.x"]))


def test_router_over_384_experts(judge, weights: Weights, config: ModelConfig, release: Goldens):
    leaves, x = weights("layers.5.ffn.gate."), release["gate.x"]

    @jax.jit
    def run(leaves: Any, x: jax.Array, image: jax.Array) -> tuple:
        router = Router(leaves, config)
        return router.scores(x), *router(x, jnp.zeros_like(image)), *router(x, image)

    scores, experts, factors, mixed_experts, mixed_factors = run(leaves, x, release["gate.image_mask"] == 1)
    judge.check("gate.scores", scores)
    judge.check("gate.text.experts", experts)
    judge.check("gate.text.weights", factors)
    judge.check("gate.mixed.experts", mixed_experts)
    judge.check("gate.mixed.weights", mixed_factors)


def test_moe_sublayer(judge, weights: Weights, config: ModelConfig, release: Goldens):
    """The 18 experts that three tokens visit, packed as loaded; their numbers are made dense for the product."""
    x, image = release["moe.x"], release["moe.image_mask"] == 1
    used = np.unique(release["moe.experts"])
    parts = [weights(f"layers.5.ffn.experts.{number}.") for number in used]
    leaves = {
        "gate": weights("layers.5.ffn.gate."),
        "experts": jax.tree.map(lambda *tensors: np.stack(tensors)[None], *parts),
        "shared_experts": weights("layers.5.ffn.shared_experts."),
    }
    route = jax.jit(lambda leaves, x, image: Router(leaves, config)(x, image))
    experts, factors = route(leaves["gate"], x, image)
    judge.check("moe.experts", experts)
    judge.check("moe.weights", factors)

    @jax.jit
    def compute(leaves: Any, x: jax.Array, experts: jax.Array, factors: jax.Array) -> jax.Array:
        ffn, quantised = Experts(leaves, config), fp8_roundtrip(x)
        return ffn.combine(quantised, ffn.experts(quantised, experts, factors, jnp.int32(0), 4))

    dense = np.searchsorted(used, experts).astype(np.int32)
    judge.check("moe.y", compute(leaves, x, dense, factors))


def test_hyper_connections(judge, weights: Weights, config: ModelConfig, release: Goldens):
    hc = {name: weights(f"layers.5.hc_attn_{name}") for name in ("fn", "scale", "base")}
    stream, norm_leaves = release["mhc.stream"], weights("layers.5.attn_norm.")
    golden = Mixes(*(release[f"mhc.{name}"] for name in ("pre", "post", "comb")))

    @jax.jit
    def run(hc: dict, norm_leaves: Any, stream: jax.Array, pre_in: jax.Array, narrowed: jax.Array, y: jax.Array):
        z = mixing_logits(stream, hc["fn"], config.norm_eps)
        mixes = split_mixes(z, hc["scale"], hc["base"], config.hc_sinkhorn_iters, config.hc_eps)
        norm = RMSNorm(norm_leaves, config.norm_eps)
        return z, mixes, narrow(stream, pre_in), norm(narrowed), widen(y, stream, golden)

    rest = (release[f"mhc.{name}"] for name in ("pre_in", "narrowed", "y"))
    z, mixes, narrowed, normed, widened = run(hc, norm_leaves, stream, *rest)
    judge.check("mhc.mixes", z)
    for name in ("pre", "post", "comb"):
        judge.check(f"mhc.{name}", getattr(mixes, name))
    judge.check("mhc.narrowed", narrowed)
    judge.check("mhc.normed", normed)
    judge.check("mhc.stream_out", widened)


def test_engram_rows_and_gate(judge, weights: Weights, config: ModelConfig, release: Goldens):
    """Rows of the 100 GB table by number, in a table of their own."""
    used, places = np.unique(release["engram.table_rows"], return_inverse=True)
    rows = [weights(f"layers.1.engram.embed.row.{row}.") for row in used]
    leaves = {
        "embed": jax.tree.map(lambda *tensors: np.stack(tensors), *rows),
        "wkv": weights("layers.1.engram.wkv."),
        "q_weight": weights("layers.1.engram.q_weight"),
        "k_weight": weights("layers.1.engram.k_weight"),
    }

    @jax.jit
    def run(leaves: Any, places: jax.Array, stream: jax.Array, text: jax.Array, kv: jax.Array) -> tuple:
        engram = Engram(leaves, config)
        memory = engram.embed(places)
        keys = kv.reshape(stream.shape[0], config.hc_mult + 1, config.dim)[:, :-1]
        gate = jnp.where(text[:, None], engram.gate(stream, keys), 0)
        return engram.wkv(fp8_roundtrip(memory)), gate, engram(stream, memory, text)

    places = places.reshape(release["engram.table_rows"].shape).astype(np.int32)
    text = release["engram.text_mask"] == 1
    kv, gate, y = run(leaves, places, release["engram.stream"], text, release["engram.kv"])
    judge.check("engram.kv", kv)
    judge.check("engram.gate", gate)
    judge.check("engram.y", y)


def sequence(length: int) -> Tokens:
    """The first tokens of one row."""
    place = jnp.arange(length, dtype=jnp.int32)
    yes, zero = jnp.ones(length, bool), jnp.zeros(length, jnp.int32)
    return Tokens(zero, place, zero, place > 0, place == length - 1, yes, ~yes)


@pytest.mark.parametrize("ratio", [2, 1])
def test_compressor(judge, weights: Weights, config: ModelConfig, release: Goldens, ratio: int):
    name, layer = f"compressor.ratio{ratio}", {2: 2, 1: 20}[ratio]
    attn, frequencies = weights(f"layers.{layer}.attn."), layer_frequencies(config, True)
    layout = cache_layout(config, with_draft=False)
    x, row_positions = release[f"{name}.x"], release[f"{name}.row_positions"]
    tokens = sequence(len(x))

    @jax.jit
    def run(attn: Any, x: jax.Array, latent: jax.Array, key: jax.Array, kv_rotated: jax.Array, key_rotated: jax.Array):
        compressor, indexer = Compressor(attn["compressor"], config, ratio), Indexer(attn["indexer"], config)
        pairs = jnp.zeros((3, 1, 2, config.head_dim))
        made, pairs, _ = compressor.latents(x, tokens, pairs, jnp.int32(1), compressor.empty_carry())
        cos, sin = angles(row_positions, frequencies)
        still = jnp.ones_like(cos), jnp.zeros_like(sin)
        per_token = (compressor.wkv.wide(x), compressor.wgate.wide(x)) if ratio == 2 else ()
        rows = (
            row_bytes(pack_kv(kv_rotated, layout.kv_row), layout.kv_row),
            row_bytes(pack_key(key_rotated, layout.key_row), layout.key_row),
        )
        turned = rotate(latent, cos, sin), rotate(key, cos, sin)
        return made, pairs, per_token, indexer.keys(latent, *still), indexer.keys(latent, cos, sin), turned, rows

    stages = (release[f"{name}.{stage}"] for stage in ("latent", "key", "kv_stored_rotated", "key_stored_rotated"))
    made, pairs, per_token, keys, rotated_keys, turned, rows = run(attn, x, *stages)
    judge.check(f"{name}.latent", made[ratio - 1 :: ratio][:4])
    judge.check(f"{name}.key", keys)
    judge.check(f"{name}.kv_stored_rotated", turned[0])
    judge.check(f"{name}.key_stored_rotated", turned[1])
    judge.check(f"{name}.key_stored_rotated", rotated_keys)
    judge.check(f"{name}.kv_stored_row", rows[0])
    judge.check(f"{name}.key_stored_row", rows[1])
    if ratio == 2:
        judge.check(f"{name}.kv", per_token[0])
        judge.check(f"{name}.score", per_token[1])
        assert np.array_equal(pairs[1, 0], [per_token[0][-1], per_token[1][-1]]), "the last token waits"
        assert not np.any(pairs[np.array([0, 2])])


@pytest.mark.parametrize(("base", "layer"), [("compressed_base", 2), ("plain_base", 0)])
def test_window_rows(judge, weights: Weights, config: ModelConfig, release: Goldens, base: str, layer: int):
    name, frequencies = f"window.{base}", layer_frequencies(config, layer > 0)
    row = cache_layout(config, with_draft=False).window_row

    @jax.jit
    def run(wkv: Any, kv_norm: Any, x: jax.Array, position: jax.Array, kv: jax.Array, rotated: jax.Array) -> tuple:
        made = RMSNorm(kv_norm, config.norm_eps)(Fp8Linear(wkv)(fp8_roundtrip(x)))
        return made, rotate(kv, *angles(position, frequencies)), row_bytes(pack_window(rotated, row), row)

    given = (release[f"{name}.{stage}"] for stage in ("x", "positions", "kv", "kv_stored_rotated"))
    attn = f"layers.{layer}.attn"
    kv, rotated, stored = run(weights(f"{attn}.wkv."), weights(f"{attn}.kv_norm."), *given)
    judge.check(f"{name}.kv", kv)
    judge.check(f"{name}.kv_stored_rotated", rotated)
    judge.check(f"{name}.kv_stored_row", stored)
