"""Laws between the fields of a config: a contradiction is an error naming the config.json field."""

from typing import TYPE_CHECKING

from rorqual.model.config_fields import require
from rorqual.model.engram_hash import table_primes

if TYPE_CHECKING:
    from rorqual.model.config import ModelConfig

GROUP = 32  # features that share one scale, in every format but the compressed KV's (spec section 2)


def check_config(config: "ModelConfig") -> None:
    """Raises ConfigError on the first contradiction."""
    _check_sizes(config)
    _check_sources(config)
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
        require(
            size >= config.rope_head_dim, f"text_config.{field}", size, f">= qk_rope_head_dim {config.rope_head_dim}"
        )
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
    for layer in config.kv_source_layers:
        require(config.ratio(layer) > 0, kv_field, layer, f"no layer with compress ratio 0 (layer {layer})")
        require(
            layer in config.index_source_layers,
            index_field,
            config.index_source_layers,
            f"KV source {layer} among them",
        )
    for layer in config.index_source_layers:
        require(config.ratio(layer) > 0, index_field, layer, f"no layer with compress ratio 0 (layer {layer})")
    for layer in range(config.n_layers):
        if config.ratio(layer) == 0:
            continue
        source = config.kv_source_of(layer)
        require(
            source is not None, kv_field, config.kv_source_layers, f"a source at or before layer {layer} of ratio > 0"
        )
        if source is not None:
            require(
                config.ratio(layer) == config.ratio(source),
                f"text_config.compress_ratios[{layer}]",
                config.ratio(layer),
                f"{config.ratio(source)}, the ratio of KV source {source}",
            )
    for ratio in config.compress_ratios[config.n_layers :]:
        require(ratio == 0, "text_config.compress_ratios", ratio, "0 for the draft layers")
    _check_candidates(config)


def _check_candidates(config: "ModelConfig") -> None:
    chosen = config.candidate_source_layer
    if chosen < 0:
        return
    field = "text_config.candidate_source_layer_id"
    require(
        chosen in config.index_source_layers, field, chosen, f"one of the index sources {config.index_source_layers}"
    )
    for layer in config.index_source_layers:
        if layer > chosen:
            # Candidate blocks are numbered in groups of the candidate source's ratio.
            found = f"{chosen} of ratio {config.ratio(chosen)}"
            require(
                config.ratio(layer) == config.ratio(chosen),
                field,
                found,
                f"ratio {config.ratio(layer)} of layer {layer}",
            )


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
