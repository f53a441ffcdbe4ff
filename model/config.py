"""The model's shapes and constants, read from the nested config.json of a checkpoint (spec section 1).

No jax here: the host plane reads this too.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.model.config_fields import ConfigError as ConfigError
from rorqual.model.config_fields import Section
from rorqual.model.config_laws import check_config

logger = logging.getLogger(__name__)

# Fields that other software writes into config.json and that do not change what the model computes.
IGNORED_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "dtype",
        "initializer_range",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
DRAFT_FIELDS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
_LARGE = 2**31 - 1


@dataclass(frozen=True)
class YarnConfig:
    """RoPE stretching of layers with ratio > 0 (spec section 4). `original_length` 0 switches it off."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class EngramConfig:
    """n-gram memory (spec section 8). `vocab_size` is the lower bound of the bucket primes, one row count per layer."""

    layers: tuple[int, ...]
    max_ngram: int
    n_heads: int
    head_dim: int
    vocab_size: int
    num_embeddings: tuple[int, ...]
    pad_id: int
    compressed_vocab_size: int

    @property
    def n_columns(self) -> int:
        """Table rows looked up per position and layer: n-gram sizes 2..max_ngram times heads."""
        return (self.max_ngram - 1) * self.n_heads


@dataclass(frozen=True)
class DraftConfig:
    """DSpark draft head (spec section 11)."""

    n_layers: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    n_activated_experts: int


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower and aligner (spec section 12). `max_wh_ratio` None: no bound on the aspect ratio."""

    n_layers: int
    dim: int
    n_heads: int
    inter_dim: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass needs to know, under the reference names of spec section 1."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    moe_inter_dim: int
    n_routed_experts: int
    n_activated_experts: int
    n_shared_experts: int
    score_func: str
    norm_topk_prob: bool
    route_scale: float
    gate_temp: float
    swiglu_limit: float
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layer: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig
    max_context: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    norm_eps: float
    engram: EngramConfig
    draft: DraftConfig | None
    vision: VisionConfig | None
    bos_id: int
    eos_id: int
    pad_id: int
    image_token_id: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Reads the parsed config.json. Raises ConfigError naming the field; fields not known give one warning."""
        top = Section(values, "")
        top.constant("model_type", "deepseek_v41")
        text = top.section("text_config")
        text.constant("model_type", "deepseek_v41_text")
        quantization = top.section("quantization_config")
        _read_constants(top, text, quantization)
        n_layers = text.integer("num_hidden_layers")
        vocab_size = text.integer("vocab_size")
        yarn = text.section("rope_scaling")
        vision, vision_unknown = _read_vision(top)
        draft = _read_draft(text, n_layers, vocab_size)
        config = cls(
            vocab_size=vocab_size,
            n_layers=n_layers,
            **_read_block_sizes(text),
            **_read_routing(text),
            **_read_attention(text, n_layers, 0 if draft is None else draft.n_layers),
            yarn=_read_yarn(yarn),
            engram=_read_engram(text, n_layers, vocab_size),
            draft=draft,
            vision=vision,
            bos_id=top.integer("bos_token_id", 0, vocab_size - 1),
            eos_id=top.integer("eos_token_id", 0, vocab_size - 1),
            pad_id=top.integer("pad_token_id", 0, vocab_size - 1),
            image_token_id=top.integer("image_token_id", 0, vocab_size - 1),
        )
        check_config(config)
        unknown = vision_unknown
        for section in (top, text, yarn, quantization):
            unknown += section.unknown(IGNORED_FIELDS)
        if unknown:
            logger.warning("config.json: ignoring unknown fields: %s", ", ".join(sorted(unknown)))
        return config

    def ratio(self, layer: int) -> int:
        """Compress ratio of a layer, 0 for window-only layers; draft stage s is layer n_layers + s."""
        return self.compress_ratios[layer]

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed KV this one reads, None for window-only layers (spec section 5)."""
        return self._last_source(self.kv_source_layers, layer)

    def index_source_of(self, layer: int) -> int | None:
        """The layer whose selection this one uses, None for window-only layers (spec section 6)."""
        return self._last_source(self.index_source_layers, layer)

    def _last_source(self, sources: tuple[int, ...], layer: int) -> int | None:
        if self.ratio(layer) == 0:
            return None
        return max((source for source in sources if source <= layer), default=None)


def read_config(model_dir: str | Path) -> ModelConfig:
    """Reads `model_dir`/config.json. Raises ConfigError when it is absent, not JSON or not this model."""
    path = Path(model_dir) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    return ModelConfig.from_json(values)


def released_config() -> ModelConfig:
    """The config of the released checkpoint (spec section 1)."""
    path = Path(__file__).with_name("released_config.json")
    return ModelConfig.from_json(json.loads(path.read_text(encoding="utf-8")))


def _read_constants(top: Section, text: Section, quantization: Section) -> None:
    """Fields whose other values name models this engine does not compute."""
    quantization.constant("quant_method", "fp8")
    quantization.constant("activation_scheme", "dynamic")
    quantization.constant("weight_block_size", [32, 32])
    quantization.constant("scale_fmt", "ue8m0")
    quantization.constant("expert_dtype", "fp4")
    text.constant("num_key_value_heads", 1)
    text.constant("hidden_act", "silu")
    text.constant("topk_method", "noaux_tc")
    for section in (top, text):
        for name in ("attention_bias", "tie_word_embeddings"):
            if section.has(name):
                section.constant(name, False)


def _read_block_sizes(text: Section) -> dict[str, Any]:
    return {
        "dim": text.integer("hidden_size"),
        "n_heads": text.integer("num_attention_heads"),
        "head_dim": text.integer("head_dim"),
        "rope_head_dim": text.integer("qk_rope_head_dim"),
        "q_lora_rank": text.integer("q_lora_rank"),
        "o_groups": text.integer("o_groups"),
        "o_lora_rank": text.integer("o_lora_rank"),
        "window_size": text.integer("sliding_window"),
        "rope_theta": text.number("rope_theta"),
        "compress_rope_theta": text.number("compress_rope_theta"),
        "max_context": text.integer("max_position_embeddings"),
        "hc_mult": text.integer("hc_mult"),
        "hc_sinkhorn_iters": text.integer("hc_sinkhorn_iters"),
        "hc_eps": text.number("hc_eps"),
        "norm_eps": text.number("rms_norm_eps"),
    }


def _read_routing(text: Section) -> dict[str, Any]:
    num_experts = text.integer("n_routed_experts")
    return {
        "moe_inter_dim": text.integer("moe_intermediate_size"),
        "n_routed_experts": num_experts,
        "n_activated_experts": text.integer("num_experts_per_tok", 1, num_experts),
        "n_shared_experts": text.constant("n_shared_experts", 1),
        "score_func": text.constant("scoring_func", "sqrtsoftplus"),
        "norm_topk_prob": text.boolean("norm_topk_prob"),
        "route_scale": text.number("routed_scaling_factor"),
        # The released config has no such field; the reference then divides by 1.
        "gate_temp": text.number("gate_temp") if text.has("gate_temp") else 1.0,
        "swiglu_limit": text.number("swiglu_limit", zero_allowed=True),
    }


def _read_attention(text: Section, n_layers: int, n_draft_layers: int) -> dict[str, Any]:
    ratios = text.integers("compress_ratios", 0, 2)
    wanted = n_layers + n_draft_layers
    if len(ratios) < wanted:
        raise ConfigError(
            f"text_config.compress_ratios: found {len(ratios)} entries, expected at least {wanted} "
            f"({n_layers} layers and {n_draft_layers} draft layers)"
        )
    return {
        # A checkpoint stripped of its draft layers keeps the list of the full model: the entries beyond are unused.
        "compress_ratios": ratios[:wanted],
        "kv_source_layers": text.integers("kv_source_layer_ids", 0, n_layers - 1, rising=True),
        "index_source_layers": text.integers("index_source_layer_ids", 0, n_layers - 1, rising=True),
        "candidate_source_layer": max(text.integer("candidate_source_layer_id", -_LARGE, n_layers - 1), -1),
        "candidate_topk_blocks": text.integer("candidate_topk_blocks"),
        "candidate_block_size": text.integer("candidate_block_size"),
        "index_n_heads": text.integer("index_n_heads"),
        "index_head_dim": text.integer("index_head_dim"),
        "index_topk": text.integer("index_topk"),
    }


def _read_yarn(yarn: Section) -> YarnConfig:
    yarn.constant("rope_type", "yarn")
    return YarnConfig(
        factor=yarn.number("factor"),
        original_length=yarn.integer("original_max_position_embeddings", 0),
        beta_fast=yarn.number("beta_fast"),
        beta_slow=yarn.number("beta_slow"),
    )


def _read_engram(text: Section, n_layers: int, vocab_size: int) -> EngramConfig:
    return EngramConfig(
        layers=text.integers("engram_layer_ids", 0, n_layers - 1, rising=True),
        max_ngram=text.integer("engram_max_ngram_size", 2),
        n_heads=text.integer("engram_n_heads"),
        head_dim=text.integer("engram_head_dim"),
        vocab_size=text.integer("engram_vocab_size", 2),
        # Row ids are int32 on the device.
        num_embeddings=text.integers("engram_num_embeddings", 1, _LARGE),
        pad_id=text.integer("engram_pad_token_id", 0, vocab_size - 1),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size", 1, vocab_size),
    )


def _read_draft(text: Section, n_layers: int, vocab_size: int) -> DraftConfig | None:
    """None when there are no draft layers; the dspark_* fields may then hold anything."""
    num_stages = text.integer("num_nextn_predict_layers", 0)
    if num_stages == 0:
        for name in DRAFT_FIELDS:
            if text.has(name):
                text.raw(name)
        return None
    num_experts = text.integer("dspark_n_routed_experts")
    return DraftConfig(
        n_layers=num_stages,
        block_size=text.integer("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id", 0, vocab_size - 1),
        target_layers=text.integers("dspark_target_layer_ids", 0, n_layers - 1, rising=True),
        markov_rank=text.integer("dspark_markov_rank"),
        n_routed_experts=num_experts,
        n_activated_experts=text.integer("dspark_num_experts_per_tok", 1, num_experts),
    )


def _read_vision(top: Section) -> tuple[VisionConfig | None, list[str]]:
    """The vision part, None when vision_config is null or has no layers, and the names of its unknown fields."""
    if top.raw("vision_config") is None:
        return None, []
    vision = top.section("vision_config")
    vision.constant("model_type", "deepseek_v41_vision")
    n_layers = vision.integer("num_hidden_layers", 0)
    if n_layers == 0:
        return None, []
    ratio = vision.raw("max_wh_ratio")
    config = VisionConfig(
        n_layers=n_layers,
        dim=vision.integer("hidden_size"),
        n_heads=vision.integer("num_attention_heads"),
        inter_dim=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        rope_theta=vision.number("rope_theta"),
        downsample_ratio=vision.integer("downsample_ratio"),
        max_image_tokens=vision.integer("max_image_tokens", 4),
        min_pixels=vision.integer("min_pixels"),
        max_wh_ratio=None if ratio is None else vision.number("max_wh_ratio"),
    )
    return config, vision.unknown(IGNORED_FIELDS)
