"""The demo checkpoint: whole, loadable, the same bytes every time, and of sane size."""

import hashlib
import json
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from rorqual.model.checkpoint import Checkpoint, open_checkpoint
from rorqual.model.config import ModelConfig, read_config
from rorqual.model.declarations import PARTS, declare
from rorqual.model.demo import write_demo_checkpoint
from rorqual.model.engram_hash import compressed_map, engram_hash
from rorqual.model.number_formats import dequantise_fp4_rows, dequantise_fp8_rows, dequantise_fp8_tiles


@pytest.fixture(scope="module")
def config(demo_dir: Path) -> ModelConfig:
    return read_config(demo_dir)


@pytest.fixture(scope="module")
def checkpoint(demo_dir: Path, config: ModelConfig) -> Checkpoint:
    return open_checkpoint(demo_dir, declare(config))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_complete_and_silent(demo_dir: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        opened = open_checkpoint(demo_dir, declare(read_config(demo_dir)))
    assert not caplog.records
    assert {weight.part for weight in opened.weights.values()} == set(PARTS)
    assert sum(path.stat().st_size for path in demo_dir.iterdir()) < 300e6


def test_every_block_kind(config: ModelConfig):
    layers = range(config.n_layers)
    kinds = {
        (config.ratio(layer), layer in config.kv_source_layers, layer in config.index_source_layers) for layer in layers
    }
    full, reindex, reuse = (True, True), (False, True), (False, False)
    assert kinds == {(0, *reuse), (2, *full), (2, *reuse), (1, *full), (1, *reindex), (1, *reuse)}
    assert config.candidate_source_layer == 4
    assert config.window_size == 128
    assert config.max_context == 16384
    # Fewer candidates than the selection takes would leave slots empty, which the release never does.
    assert (config.candidate_topk_blocks - 1) * config.candidate_block_size >= config.index_topk


def test_same_seed_same_bytes_other_seed_other_weights(demo_dir: Path, tmp_path: Path):
    again, other = tmp_path / "again", tmp_path / "other"
    write_demo_checkpoint(again)
    assert digests(again) == digests(demo_dir)
    write_demo_checkpoint(other, seed=1)
    changed = {name for name, digest in digests(other).items() if digest != digests(demo_dir)[name]}
    assert changed == {path.name for path in demo_dir.glob("*.safetensors")}


def test_an_existing_checkpoint_is_left_alone(demo_dir: Path):
    before = digests(demo_dir)
    with pytest.raises(FileExistsError, match="config.json"):
        write_demo_checkpoint(demo_dir, seed=1)
    assert digests(demo_dir) == before


def test_tokenizer_is_that_of_the_release(demo_dir: Path, config: ModelConfig):
    tokenizer = Tokenizer.from_file(str(demo_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config.vocab_size
    assert tokenizer.id_to_token(128799) == "<｜System｜>"
    assert tokenizer.id_to_token(config.image_token_id) == "<｜deepseek_image｜>"
    assert tokenizer.encode("<｜System｜>hello<｜deepseek_image｜>").ids[::2] == [128799, 129264]
    assert config.engram.compressed_vocab_size == 99092
    assert engram_hash(config, compressed_map(demo_dir / "tokenizer.json")).pad == 2


def test_generation_defaults(demo_dir: Path):
    values = json.loads((demo_dir / "generation_config.json").read_text())
    assert values["eos_token_id"] == 1
    assert 0 < values["top_p"] <= 1


def decoded(checkpoint: Checkpoint, name: str) -> np.ndarray:
    stored = checkpoint.read(name)
    kind = checkpoint.weights[name].dtype
    if kind in ("BF16", "F32"):
        return stored.astype(np.float32)
    scale = checkpoint.read(name.removesuffix("weight") + "scale")
    if kind == "I8":
        return dequantise_fp4_rows(stored, scale, np.float32)
    by_row = ".engram.embed." in name
    return (dequantise_fp8_rows if by_row else dequantise_fp8_tiles)(stored, scale, np.float32)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("head.weight", 1.5 / 16),
        ("embed.weight", 1.0),
        ("layers.1.engram.embed.weight", 1.0),
        ("layers.1.engram.wkv.weight", 384**-0.5),
        ("layers.2.attn.wq_b.weight", 128**-0.5),
        ("layers.4.ffn.experts.3.w1.weight", 1 / 16),
        ("layers.4.ffn.experts.3.w2.weight", 3 * 128**-0.5),
        ("mtp.0.main_proj.weight", 768**-0.5),
    ],
)
def test_weights_have_the_size_that_keeps_activations_steady(checkpoint: Checkpoint, name: str, deviation: float):
    values = decoded(checkpoint, name)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.05 * deviation
    # A matrix of few tiles has few scales, whose spread shows.
    assert values.std() == pytest.approx(deviation, rel=0.25)


def test_scales_vary(checkpoint: Checkpoint):
    for name in ("layers.0.attn.wq_a.scale", "layers.0.ffn.experts.0.w1.scale", "layers.1.engram.embed.scale"):
        assert len(np.unique(checkpoint.read(name))) == 3


def test_views_are_aligned(checkpoint: Checkpoint):
    """An unaligned view would be copied before it goes to a device."""
    for name, weight in checkpoint.weights.items():
        view = checkpoint.read(name)
        assert view.flags.aligned, name
        assert view.dtype != ml_dtypes.bfloat16 or weight.dtype == "BF16"
