"""Every weight of the checkpoint, declared once: name, stored shape, stored type, logical axes (spec section 13).

Byte counts, loader checks, abstract trees and shardings all derive from `declare`. No jax here.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rorqual.model.config import DraftConfig, ModelConfig, VisionConfig

PARTS = ("backbone", "engram", "draft", "vision")
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
GROUP = 32  # edge of an FP8 scale tile, and elements per scale along a row of FP4 weights and Engram tables

Axes = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor as stored. `dtype` is the safetensors name; `axes` has one logical axis name (or None) per dim.

    A scale tensor carries the axes of the weight it belongs to: its dims count tiles or groups along them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    part: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def declare(config: ModelConfig) -> dict[str, Weight]:
    """All weights of the checkpoint by name, in order: embedding, layers, norm and head, draft stages, vision."""
    weights: dict[str, Weight] = {}
    for weight in _all_weights(config):
        weights[weight.name] = weight
    return weights


def _all_weights(config: ModelConfig) -> Iterator[Weight]:
    yield _bf16("embed.weight", (config.vocab_size, config.dim), ("vocab", "dim"))
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        if layer in config.engram.layers:
            yield from _engram(config, layer, prefix + "engram.")
        yield from _block(config, prefix, config.n_routed_experts, "backbone")
        yield from _compressor(config, layer, prefix + "attn.compressor.")
        yield from _indexer(config, layer, prefix + "attn.indexer.")
    yield _bf16("norm.weight", (config.dim,), ("dim",))
    yield _bf16("head.weight", (config.vocab_size, config.dim), ("vocab", "dim"))
    if config.draft is not None:
        yield from _draft(config, config.draft)
    if config.vision is not None:
        yield from _vision(config, config.vision)


def _bf16(name: str, shape: tuple[int, ...], axes: Axes, part: str = "backbone") -> Weight:
    return Weight(name, shape, "BF16", axes, part)


def _f32(name: str, shape: tuple[int, ...], axes: Axes, part: str = "backbone") -> Weight:
    return Weight(name, shape, "F32", axes, part)


def _fp8(name: str, shape: tuple[int, int], axes: Axes, part: str = "backbone") -> Iterator[Weight]:
    """Codes [out, in] and one E8M0 scale per 32x32 tile; the last tile of either dim may be partial."""
    rows, columns = shape
    yield Weight(name + ".weight", shape, "F8_E4M3", axes, part)
    yield Weight(name + ".scale", (-(-rows // GROUP), -(-columns // GROUP)), "F8_E8M0", axes, part)


def _fp4(name: str, shape: tuple[int, int], axes: Axes, part: str) -> Iterator[Weight]:
    """Codes [out, in / 2] (two e2m1 a byte) and one E8M0 scale per row and 32 inputs."""
    rows, columns = shape
    yield Weight(name + ".weight", (rows, columns // 2), "I8", axes, part)
    yield Weight(name + ".scale", (rows, columns // GROUP), "F8_E8M0", axes, part)


def _block(config: ModelConfig, prefix: str, num_experts: int, part: str) -> Iterator[Weight]:
    """What every transformer block has: attention with its window KV, MoE, two sets of mHC coefficients."""
    yield from _attention(config, prefix, part)
    yield from _experts(config, prefix, num_experts, part)
    copies = config.hc_mult
    mixes = (2 + copies) * copies
    for sublayer in ("attn", "ffn"):
        yield _f32(f"{prefix}hc_{sublayer}_fn", (mixes, copies * config.dim), (None, None), part)
        yield _f32(f"{prefix}hc_{sublayer}_base", (mixes,), (None,), part)
        yield _f32(f"{prefix}hc_{sublayer}_scale", (3,), (None,), part)


def _attention(config: ModelConfig, prefix: str, part: str) -> Iterator[Weight]:
    dim, latent, q_rank = config.dim, config.head_dim, config.q_lora_rank
    heads_dim = config.n_heads * latent
    o_dim = config.o_groups * config.o_lora_rank
    attn = prefix + "attn."
    yield _bf16(prefix + "attn_norm.weight", (dim,), ("dim",), part)
    yield from _fp8(attn + "wq_a", (q_rank, dim), ("q_lora", "dim"), part)
    yield _bf16(attn + "q_norm.weight", (q_rank,), ("q_lora",), part)
    yield from _fp8(attn + "wq_b", (heads_dim, q_rank), ("heads", "q_lora"), part)
    yield from _fp8(attn + "wkv", (latent, dim), ("kv", "dim"), part)
    yield _bf16(attn + "kv_norm.weight", (latent,), ("kv",), part)
    # Rows of wo_a are grouped like the heads; its columns are the heads of one group.
    yield from _fp8(attn + "wo_a", (o_dim, heads_dim // config.o_groups), ("o_lora", None), part)
    yield from _fp8(attn + "wo_b", (dim, o_dim), ("dim", "o_lora"), part)
    yield _f32(attn + "attn_sink", (config.n_heads,), ("heads",), part)


def _experts(config: ModelConfig, prefix: str, num_experts: int, part: str) -> Iterator[Weight]:
    dim, inter = config.dim, config.moe_inter_dim
    ffn = prefix + "ffn."
    yield _bf16(prefix + "ffn_norm.weight", (dim,), ("dim",), part)
    yield _bf16(ffn + "gate.weight", (num_experts, dim), (None, "dim"), part)
    yield _f32(ffn + "gate.bias", (num_experts,), (None,), part)
    yield _f32(ffn + "gate.bias_vl", (num_experts,), (None,), part)
    matrices: tuple[tuple[str, tuple[int, int], Axes], ...] = (
        ("w1", (inter, dim), ("inter", "dim")),
        ("w2", (dim, inter), ("dim", "inter")),
        ("w3", (inter, dim), ("inter", "dim")),
    )
    for expert in range(num_experts):
        for matrix, shape, axes in matrices:
            yield from _fp4(f"{ffn}experts.{expert}.{matrix}", shape, axes, part)
    for matrix, shape, axes in matrices:
        yield from _fp8(f"{ffn}shared_experts.{matrix}", shape, axes, part)


def _compressor(config: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    if layer not in config.kv_source_layers:
        return
    shape = (config.head_dim, config.dim)
    yield _bf16(prefix + "wkv.weight", shape, ("kv", "dim"))
    if config.ratio(layer) > 1:
        yield _bf16(prefix + "wgate.weight", shape, ("kv", "dim"))
    yield _bf16(prefix + "norm.weight", (config.head_dim,), ("kv",))


def _indexer(config: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    if layer not in config.index_source_layers:
        return
    width = config.index_head_dim
    if layer in config.kv_source_layers:
        yield _bf16(prefix + "wk.weight", (width, config.head_dim), (None, "kv"))
        yield _bf16(prefix + "k_norm.weight", (width,), (None,))
    yield from _fp8(prefix + "wq_b", (config.index_n_heads * width, config.q_lora_rank), ("index_heads", "q_lora"))
    yield _bf16(prefix + "weights_proj.weight", (config.index_n_heads, config.dim), ("index_heads", "dim"))


def _engram(config: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    engram = config.engram
    rows = engram.num_embeddings[engram.layers.index(layer)]
    copies = (config.hc_mult, config.dim)
    yield Weight(prefix + "embed.weight", (rows, engram.head_dim), "F8_E4M3", ("engram_row", None), "engram")
    yield Weight(prefix + "embed.scale", (rows, engram.head_dim // GROUP), "F8_E8M0", ("engram_row", None), "engram")
    kv_shape = ((config.hc_mult + 1) * config.dim, engram.n_columns * engram.head_dim)
    yield from _fp8(prefix + "wkv", kv_shape, (None, None), "engram")
    yield _bf16(prefix + "q_weight", copies, (None, "dim"), "engram")
    yield _bf16(prefix + "k_weight", copies, (None, "dim"), "engram")


def _draft(config: ModelConfig, draft: DraftConfig) -> Iterator[Weight]:
    dim, rank, part = config.dim, draft.markov_rank, "draft"
    for stage in range(draft.n_layers):
        prefix = f"mtp.{stage}."
        if stage == 0:
            yield from _fp8(prefix + "main_proj", (dim, len(draft.target_layers) * dim), ("dim", None), part)
            yield _bf16(prefix + "main_norm.weight", (dim,), ("dim",), part)
        yield from _block(config, prefix, draft.n_routed_experts, part)
        if stage == draft.n_layers - 1:
            yield _bf16(prefix + "norm.weight", (dim,), ("dim",), part)
            for matrix in ("embed", "head"):
                yield _bf16(f"{prefix}markov_head.{matrix}.weight", (config.vocab_size, rank), ("vocab", None), part)
            yield _bf16(prefix + "confidence_head.proj.weight", (1, dim + rank), (None, None), part)


def _vision(config: ModelConfig, vision: VisionConfig) -> Iterator[Weight]:
    def plain(name: str, *shape: int) -> Weight:
        return _bf16(name, shape, (None,) * len(shape), "vision")

    width, inter = vision.dim, vision.inter_dim
    yield plain("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield plain("vision.patch_embed.proj.bias", width)
    for block in range(vision.n_layers):
        prefix = f"vision.blocks.{block}."
        yield plain(prefix + "norm1.weight", width)
        yield plain(prefix + "attn.wqkv.weight", 3 * width, width)
        yield plain(prefix + "attn.wqkv.bias", 3 * width)
        yield plain(prefix + "attn.wo.weight", width, width)
        yield plain(prefix + "attn.wo.bias", width)
        yield plain(prefix + "norm2.weight", width)
        yield plain(prefix + "mlp.w1.weight", 2 * inter, width)
        yield plain(prefix + "mlp.w2.weight", width, inter)
    yield plain("vision.norm.weight", width)
    yield plain("aligner.w1.weight", config.dim, width * vision.downsample_ratio**2)
    yield plain("aligner.w1.bias", config.dim)
    yield plain("aligner.w2.weight", config.dim, config.dim)
    yield plain("aligner.w2.bias", config.dim)
    for token in ("start", "end", "newline"):
        yield plain(f"image_{token}", config.dim)
