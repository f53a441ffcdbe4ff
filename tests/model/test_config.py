"""The config is strict: what is missing or contradictory is an error that names the field."""

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.model.config import ConfigError, ModelConfig, read_config, released_config


@pytest.fixture
def values(tiny_dir: Path) -> dict:
    return json.loads((tiny_dir / "config.json").read_text())


def test_released_values():
    config = released_config()
    assert (config.dim, config.n_layers, config.head_dim, config.vocab_size) == (5120, 40, 512, 129280)
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert config.engram.num_embeddings == (384_006_168, 384_016_682)
    assert config.engram.n_columns == 24
    assert config.gate_temp == 1.0
    assert config.draft.target_layers == (37, 38, 39)
    assert config.vision.n_layers == 32
    assert hash(config) == hash(released_config())


def test_sources_are_the_last_at_or_before_the_layer():
    config = released_config()
    assert [config.kv_source_of(layer) for layer in (0, 1, 2, 7, 8, 19, 20, 39)] == [None, None, 2, 2, 8, 14, 20, 20]
    assert [config.index_source_of(layer) for layer in (1, 2, 23, 24, 39)] == [None, 2, 20, 24, 36]
    assert config.kv_source_of(40) is None  # a draft stage


def test_tiny_from_file(tiny_dir: Path):
    config = read_config(tiny_dir)
    assert (config.window_size, config.candidate_source_layer, config.image_token_id) == (16, 5, 510)
    assert (config.yarn.factor, config.yarn.original_length) == (4.0, 32)


CONTRADICTIONS = [
    ("model_type", "deepseek_v3", "model_type"),
    ("text_config.model_type", "llama", "text_config.model_type"),
    ("text_config.kv_source_layer_ids", [1, 4, 5], "kv_source_layer_ids"),  # layer 1 has ratio 0
    ("text_config.kv_source_layer_ids", [4, 5], "kv_source_layer_ids"),  # layers 2 and 3 have no source
    ("text_config.kv_source_layer_ids", [4, 2, 5], "kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [2, 4, 8], "kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [2, 3, 4, 5], "index_source_layer_ids"),  # 3 selects nothing
    ("text_config.kv_source_layer_ids", [2, 4], "compress_ratios[5]"),  # ratio 1 reads a ratio-2 source
    ("text_config.index_source_layer_ids", [0, 2, 4, 5, 7], "index_source_layer_ids"),
    ("text_config.candidate_source_layer_id", 6, "candidate_source_layer_id"),
    ("text_config.candidate_source_layer_id", 4, "candidate_source_layer_id"),  # later sources have another ratio
    ("text_config.compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1], "compress_ratios"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1, 0, 1, 0], "compress_ratios"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 4, 1, 1, 1, 0, 0, 0], "compress_ratios"),
    ("text_config.qk_rope_head_dim", 96, "text_config.head_dim"),
    ("text_config.qk_rope_head_dim", 15, "qk_rope_head_dim"),
    ("text_config.hidden_size", 250, "hidden_size"),
    ("text_config.moe_intermediate_size", 100, "moe_intermediate_size"),
    ("text_config.head_dim", 48, "head_dim"),
    ("text_config.o_groups", 3, "o_groups"),
    ("text_config.num_experts_per_tok", 9, "num_experts_per_tok"),
    ("text_config.num_experts_per_tok", True, "num_experts_per_tok"),
    ("text_config.num_hidden_layers", "8", "num_hidden_layers"),
    ("text_config.scoring_func", "softmax", "scoring_func"),
    ("text_config.n_shared_experts", 2, "n_shared_experts"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings"),
    ("text_config.rms_norm_eps", 0, "rms_norm_eps"),
    ("text_config.rope_theta", float("nan"), "rope_theta"),
    ("text_config.sliding_window", 15, "sliding_window"),
    ("text_config.rope_scaling.rope_type", "linear", "rope_scaling.rope_type"),
    ("text_config.engram_num_embeddings", [660, 865], "engram_num_embeddings"),
    ("text_config.engram_layer_ids", [1], "engram_num_embeddings"),
    ("text_config.engram_pad_token_id", 512, "engram_pad_token_id"),
    ("text_config.dspark_target_layer_ids", [5, 6, 8], "dspark_target_layer_ids"),
    ("text_config.dspark_noise_token_id", -1, "dspark_noise_token_id"),
    ("vision_config.num_attention_heads", 3, "vision_config.hidden_size"),
    ("quantization_config.weight_block_size", [128, 128], "quantization_config.weight_block_size"),
    ("quantization_config.expert_dtype", "fp8", "quantization_config.expert_dtype"),
    ("eos_token_id", 512, "eos_token_id"),
    ("text_config", None, "text_config"),
]


@pytest.mark.parametrize(("path", "value", "named"), CONTRADICTIONS)
def test_contradiction_names_the_field(values: dict, path: str, value: object, named: str):
    *sections, name = path.split(".")
    section = values
    for key in sections:
        section = section[key]
    section[name] = value
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(values)
    assert named in str(error.value)
    assert "expected" in str(error.value)


def test_every_missing_field_is_named(values: dict):
    optional = {"architectures", "dtype", "initializer_range", "use_cache", "attention_bias", "attention_dropout"}
    optional |= {"tie_word_embeddings"}
    paths = [(name,) for name in values]
    for section in ("text_config", "vision_config", "quantization_config"):
        paths += [(section, name) for name in values[section]]
    paths += [("text_config", "rope_scaling", name) for name in values["text_config"]["rope_scaling"]]
    for *sections, name in paths:
        broken = copy.deepcopy(values)
        section = broken
        for key in sections:
            section = section[key]
        del section[name]
        if name in optional:
            ModelConfig.from_json(broken)
            continue
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_json(broken)
        assert str(error.value) == ".".join([*sections, name]) + ": missing"


def test_unknown_fields_give_one_warning(values: dict, caplog: pytest.LogCaptureFixture):
    values["text_config"]["zebra"] = 1
    values["vision_config"]["aardvark"] = 2
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_json(values)
    assert len(caplog.records) == 1
    assert "text_config.zebra, vision_config.aardvark" in caplog.text


def test_known_foreign_fields_give_no_warning(values: dict, caplog: pytest.LogCaptureFixture):
    values["transformers_version"] = "5.0"
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_json(values)
    assert not caplog.records


def test_without_draft_and_vision(values: dict):
    """The ratios of a longer model are cut to the layers; the dspark fields of a model without drafts do not matter."""
    values["text_config"].update(num_nextn_predict_layers=0, dspark_block_size=0, dspark_target_layer_ids=[])
    values["vision_config"] = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0}
    config = ModelConfig.from_json(values)
    assert config.draft is None
    assert config.vision is None
    assert len(config.compress_ratios) == config.n_layers
    values["vision_config"] = None
    assert ModelConfig.from_json(values) == config


def test_candidates_off(values: dict):
    values["text_config"]["candidate_source_layer_id"] = -7
    assert ModelConfig.from_json(values).candidate_source_layer == -1


def test_file_missing_or_not_json(tmp_path: Path):
    with pytest.raises(ConfigError, match="missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("module", ["config", "declarations", "checkpoint", "number_formats", "engram_hash", "demo"])
def test_no_jax(module: str):
    code = f"import sys, rorqual.model.{module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
