"""Laws between the fields of a config: a contradiction is an error naming the config.json field."""

from typing import TYPE_CHECKING

from rorqual.model.config_fields import require
from rorqual.model.engram_primes import table_primes

if TYPE_CHECKING:
    from rorqual.model.config import ModelConfig

GROUP = 32  # features that share one scale, in every format but the compressed KV's (spec section 2)


def check_config(config: "ModelConfig") -> None:
    """Raises ConfigError on the first contradiction."""
    _check_sizes(config)
    _check_sources(config)
    _check_candidates(config)
    _check_engram(config)
    _check_draft(config)
    _check_vision(config)


def _multiple(field: str, found: int, of: int) -> None:
    require(found % of == 0, field, found, f"a multiple of {of}")


def _check_sizes(config: "ModelConfig") -> None:
    for field, size in (
        ("text_config.hidden_size", config.dim),
        ("text_config.moe_intermediate_size", config.moe_inter_dim),
        ("text_config.q_lora_rank", config.q_lora_rank),
        ("text_config.head_dim", config.head_dim),
        ("text_config.index_head_dim", config.index_head_dim),
        ("text_config.engram_head_dim", config.engram.head_dim),
        ("text_config.o_groups x o_lora_rank", config.o_groups * config.o_lora_rank),
    ):
        _multiple(field, size, GROUP)
    _multiple("text_config.qk_rope_head_dim", config.rope_head_dim, 2)
    # A pair of a ratio-2 compressor must not straddle two pages, and a page is the window.
    _multiple("text_config.sliding_window", config.window_size, 2)
    for field, size in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        rope_dim = config.rope_head_dim
        require(size >= rope_dim, f"text_config.{field}", size, f">= qk_rope_head_dim {rope_dim}")
    heads = config.n_heads
    require(heads % config.o_groups == 0, "text_config.o_groups", config.o_groups, f"a divisor of {heads} heads")
    require(
        config.max_context >= config.window_size,
        "text_config.max_position_embeddings",
        config.max_context,
        f">= sliding_window {config.window_size}",
    )


def _check_sources(config: "ModelConfig") -> None:
    kv_field, index_field = "text_config.kv_source_layer_ids", "text_config.index_source_layer_ids"
    kv_sources, index_sources = config.kv_source_layers, config.index_source_layers
    for field, sources in ((kv_field, kv_sources), (index_field, index_sources)):
        for layer in sources:
            require(
                config.ratio(layer) > 0, field, layer, f"layers of compress ratio 1 or 2 (layer {layer} has ratio 0)"
            )
    for layer in kv_sources:
        # A reused selection would point into the compressed KV of another source.
        require(layer in index_sources, index_field, index_sources, f"KV source {layer} among them")
    for layer in range(config.n_layers):
        ratio = config.ratio(layer)
        if ratio == 0:
            continue
        source = config.kv_source_of(layer)
        require(source is not None, kv_field, kv_sources, f"a source at or before layer {layer} of ratio {ratio}")
        if source is not None:
            expected = config.ratio(source)
            field = f"text_config.compress_ratios[{layer}]"
            require(ratio == expected, field, ratio, f"{expected}, the ratio of its KV source {source}")
    for ratio in config.compress_ratios[config.n_layers :]:
        require(ratio == 0, "text_config.compress_ratios", ratio, "0 for the draft layers")


def _check_candidates(config: "ModelConfig") -> None:
    chosen, sources = config.candidate_source_layer, config.index_source_layers
    if chosen < 0:
        return
    field = "text_config.candidate_source_layer_id"
    require(chosen in sources, field, chosen, f"negative (off) or one of the index sources {sources}")
    for layer in sources:
        # Candidate blocks are counted in groups of the candidate source's ratio.
        if layer > chosen:
            found = f"layer {chosen} of ratio {config.ratio(chosen)}"
            expected = f"the ratio of the later index source {layer}, {config.ratio(layer)}"
            require(config.ratio(layer) == config.ratio(chosen), field, found, expected)


def _check_engram(config: "ModelConfig") -> None:
    engram = config.engram
    primes = table_primes(len(engram.layers), engram.max_ngram, engram.n_heads, engram.vocab_size)
    sums = tuple(int(total) for total in primes.sum(axis=(1, 2)))
    require(
        engram.num_embeddings == sums,
        "text_config.engram_num_embeddings",
        engram.num_embeddings,
        f"{sums}, the sums of the bucket primes from engram_vocab_size {engram.vocab_size} up",
    )


def _check_draft(config: "ModelConfig") -> None:
    draft = config.draft
    if draft is None:
        return
    require(len(draft.target_layers) > 0, "text_config.dspark_target_layer_ids", [], "at least one layer")


def _check_vision(config: "ModelConfig") -> None:
    vision = config.vision
    if vision is None:
        return
    field, heads = "vision_config.hidden_size", vision.n_heads
    # Rotation pairs feature i with i + hd/2, rows and columns taking a quarter of the features each.
    require(vision.dim % (4 * heads) == 0, field, vision.dim, f"a multiple of 4 x {heads} heads")
