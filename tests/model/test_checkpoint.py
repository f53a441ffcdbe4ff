"""A load finds every tensor as declared, or says which one is wrong and how (cases: damaged checkpoints)."""

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rorqual.model.checkpoint import INDEX_NAME, Checkpoint, CheckpointError, open_checkpoint
from rorqual.model.config import ModelConfig, read_config
from rorqual.model.declarations import Weight, declare

SCALE = "layers.3.attn.wkv.scale"
EXPERT = "layers.4.ffn.experts.2.w1.weight"
EARLY, LATE = "layers.0.attn.wkv.scale", "layers.6.attn.wkv.scale"  # in the first and in the second shard
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "tiny"
    shutil.copytree(tiny_dir, copied, copy_function=shutil.copyfile)
    return copied


@pytest.fixture(scope="module")
def declared() -> dict[str, Weight]:
    return declare(read_config(Path(__file__).parents[1] / "golden" / "tiny"))


def edit_header(path: Path, change: Callable[[dict], None]) -> None:
    """Rewrites a shard's header; the data stays where it is, relative to the header's end."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_index(folder: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_reads_what_is_stored(tiny_dir: Path, declared: dict[str, Weight], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(tiny_dir, declared)
    assert not caplog.records
    assert checkpoint.nbytes == json.loads((tiny_dir / INDEX_NAME).read_text())["metadata"]["total_size"]
    for shard in (FIRST, SECOND):
        raw = (tiny_dir / shard).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                view = checkpoint.read(name)
                assert view.shape == declared[name].shape
                assert view.tobytes() == raw[8 + length + start : 8 + length + end]


def test_view_types(tiny_dir: Path, declared: dict[str, Weight]):
    checkpoint = open_checkpoint(tiny_dir, declared)
    assert checkpoint.read("layers.0.attn.wkv.weight").dtype == np.uint8
    assert checkpoint.read(SCALE).dtype == np.uint8
    assert checkpoint.read(EXPERT).dtype == np.uint8
    assert checkpoint.read("embed.weight").dtype == ml_dtypes.bfloat16
    assert checkpoint.read("layers.0.attn.attn_sink").dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.read(SCALE)[0, 0] = 0


def test_a_view_outlives_its_checkpoint(tiny_dir: Path, declared: dict[str, Weight]):
    checkpoint: Checkpoint | None = open_checkpoint(tiny_dir, declared)
    view = checkpoint.read("embed.weight")
    expected = view.tobytes()
    checkpoint = None
    assert view.tobytes() == expected


@pytest.mark.parametrize("name", [SCALE, EXPERT])
def test_missing_tensor(folder: Path, declared: dict[str, Weight], name: str):
    edit_index(folder, lambda where: where.pop(name))
    shape = list(declared[name].shape)
    with pytest.raises(CheckpointError, match="missing") as error:
        open_checkpoint(folder, declared)
    assert name in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("name", [SCALE, EXPERT])
def test_tensor_in_the_index_alone(folder: Path, declared: dict[str, Weight], name: str):
    edit_header(folder / FIRST, lambda header: header.pop(name))
    with pytest.raises(CheckpointError, match=f"{name}: expected in {FIRST}"):
        open_checkpoint(folder, declared)


def test_swapped_index_entries(folder: Path, declared: dict[str, Weight]):
    def swap(where: dict) -> None:
        where[EARLY], where[LATE] = where[LATE], where[EARLY]

    edit_index(folder, swap)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder, declared)
    assert f"{EARLY}: expected in {SECOND} by the index, found in {FIRST}" in str(error.value)
    assert f"{LATE}: expected in {FIRST} by the index, found in {SECOND}" in str(error.value)


def test_wrong_shape(folder: Path, declared: dict[str, Weight]):
    edit_header(folder / FIRST, lambda header: header[SCALE].update(shape=[8, 2]))
    with pytest.raises(CheckpointError, match=rf"{SCALE}: expected F8_E8M0 \[2, 8\], found F8_E8M0 \[8, 2\]"):
        open_checkpoint(folder, declared)


def test_wrong_type(folder: Path, declared: dict[str, Weight]):
    edit_header(folder / FIRST, lambda header: header[SCALE].update(dtype="F8_E4M3"))
    with pytest.raises(CheckpointError, match=rf"{SCALE}: expected F8_E8M0 \[2, 8\], found F8_E4M3 \[2, 8\]"):
        open_checkpoint(folder, declared)


def test_wrong_byte_count(folder: Path, declared: dict[str, Weight]):
    def shorten(header: dict) -> None:
        header[SCALE]["data_offsets"][1] -= 1

    edit_header(folder / FIRST, shorten)
    with pytest.raises(CheckpointError, match=f"{SCALE}: expected 16 bytes, found 15"):
        open_checkpoint(folder, declared)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_shard(folder: Path, declared: dict[str, Weight], kept: int):
    path = folder / SECOND
    raw = path.read_bytes()
    path.write_bytes(raw[:kept])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder, declared)
    assert SECOND in str(error.value)
    assert f"found {len(raw[:kept])} bytes, expected" in str(error.value)
    if kept == -1:
        assert f"expected {len(raw)}" in str(error.value)


def test_trailing_bytes(folder: Path, declared: dict[str, Weight]):
    with (folder / SECOND).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="expected"):
        open_checkpoint(folder, declared)


def test_missing_shard(folder: Path, declared: dict[str, Weight]):
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND}: missing"):
        open_checkpoint(folder, declared)


def test_unknown_tensors_give_one_warning(folder: Path, declared: dict[str, Weight], caplog: pytest.LogCaptureFixture):
    edit_index(folder, lambda where: where.update({"layers.9.zebra.weight": FIRST, "layers.0.extra.scale": SECOND}))
    with caplog.at_level(logging.WARNING):
        open_checkpoint(folder, declared)
    assert len(caplog.records) == 1
    assert "layers.9.zebra.weight" in caplog.text
    assert "layers.0.extra.scale" in caplog.text


def test_draft_tensors_of_a_model_without_drafts_are_listed(folder: Path, caplog: pytest.LogCaptureFixture):
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["num_nextn_predict_layers"] = 0
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(folder, declare(ModelConfig.from_json(values)))
    assert len(caplog.records) == 1
    assert "mtp.*.ffn.experts.*.w1.weight (12)" in caplog.text
    assert not any(name.startswith("mtp.") for name in checkpoint.weights)


def test_parts_not_wanted_are_skipped(folder: Path, declared: dict[str, Weight], caplog: pytest.LogCaptureFixture):
    """The second shard holds drafts and vision; its damage does not matter to a load of parts that lie in the first."""

    def move(where: dict) -> None:
        for name in [name for name, file in where.items() if file == SECOND and declared[name].part == "backbone"]:
            del where[name]

    edit_index(folder, move)
    (folder / SECOND).write_bytes(b"")
    first = {
        name: weight
        for name, weight in declared.items()
        if name in json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    }
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(folder, first, parts=("backbone", "engram"))
    assert not caplog.records
    assert {weight.part for weight in checkpoint.weights.values()} == {"backbone", "engram"}
    with pytest.raises(CheckpointError, match="not among"):
        checkpoint.read("vision.norm.weight")


def test_single_file(folder: Path, declared: dict[str, Weight]):
    (folder / FIRST).rename(folder / "model.safetensors")
    (folder / INDEX_NAME).unlink()
    weight = declared[SCALE]
    view = open_checkpoint(folder, {SCALE: weight}).read(SCALE)
    assert view.shape == weight.shape


def test_no_checkpoint(tmp_path: Path, declared: dict[str, Weight]):
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        open_checkpoint(tmp_path, declared)


def test_index_points_outside(folder: Path, declared: dict[str, Weight]):
    edit_index(folder, lambda where: where.update({SCALE: "../other.safetensors"}))
    with pytest.raises(CheckpointError, match=SCALE):
        open_checkpoint(folder, declared)
