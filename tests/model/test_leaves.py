"""The parameter plan covers the checkpoint: every tensor of backbone and Engram exactly once, byte for byte."""

import importlib.util
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from rorqual.model.config import ModelConfig
from rorqual.model.declarations import Weight, declare
from rorqual.model.layers.kinds import LayerKind, cache_layout, segments, source_number
from rorqual.model.leaves import Leaf, Storage, all_leaves
from rorqual.model.load import is_unrolled, leaf_tree

TOOLS = Path(__file__).parents[1] / "tools"
FORMS = [True, False]  # unrolled, scanned


def read(path: Path) -> ModelConfig:
    return ModelConfig.from_json(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(json.loads(files("rorqual.model").joinpath("released_config.json").read_text()))


@pytest.fixture(scope="module")
def bench(tiny_dir: Path) -> ModelConfig:
    """The 12-layer config of tools/make_bench_checkpoint.py, within the frame of the tiny one."""
    spec = importlib.util.spec_from_file_location("bench", TOOLS / "make_bench_checkpoint.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    values = json.loads((tiny_dir / "config.json").read_text())
    text = {"model_type": "deepseek_v41_text", **script.BENCH, "engram_compressed_vocab_size": 99092}
    values["text_config"] = text | {"engram_num_embeddings": script.engram_rows(text)}
    values["image_token_id"] = 129264
    values["vision_config"] = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0}
    return ModelConfig.from_json(values)


@pytest.fixture(scope="module", params=["tiny", "bench", "released"])
def config(request: pytest.FixtureRequest, tiny_dir: Path) -> ModelConfig:
    if request.param == "tiny":
        return read(tiny_dir / "config.json")
    return request.getfixturevalue(request.param)


def wanted(config: ModelConfig) -> dict[str, Weight]:
    return {name: weight for name, weight in declare(config).items() if weight.part in ("backbone", "engram")}


@pytest.mark.parametrize("unrolled", FORMS)
def test_every_tensor_is_in_the_packed_tree_once(config: ModelConfig, unrolled: bool):
    names = Counter(name for leaf in all_leaves(leaf_tree(config, "packed", unrolled)) for name in leaf.names)
    assert set(names) == set(wanted(config))
    assert set(names.values()) == {1}


@pytest.mark.parametrize("unrolled", FORMS)
def test_packed_leaves_take_the_declared_bytes(config: ModelConfig, unrolled: bool):
    leaves = all_leaves(leaf_tree(config, "packed", unrolled))
    declared = wanted(config)
    assert sum(leaf.nbytes for leaf in leaves) == sum(weight.nbytes for weight in declared.values())
    for leaf in leaves:
        assert leaf.nbytes == sum(declared[name].nbytes for name in leaf.names)
        assert {declared[name].shape for name in leaf.names} == {leaf.shape}
        assert {declared[name].axes for name in leaf.names} == {leaf.axes}


@pytest.mark.parametrize("unrolled", FORMS)
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_decoded_leaves_hold_every_number_once(config: ModelConfig, unrolled: bool, storage: Storage):
    """Scales of decoded weights go into them; Engram tables stay packed."""
    leaves = all_leaves(leaf_tree(config, storage, unrolled))
    declared = wanted(config)
    names = Counter(name for leaf in leaves for name in leaf.names)
    folded = {name for name, w in declared.items() if w.dtype == "F8_E8M0" and ".engram.embed." not in name}
    assert set(names) == set(declared) - folded
    assert set(names.values()) == {1}
    for leaf in leaves:
        check_decoded(leaf, declared[leaf.names[0]], storage)


def check_decoded(leaf: Leaf, weight: Weight, storage: Storage) -> None:
    rows, *columns = weight.shape
    if weight.dtype == "I8":
        assert leaf.form == "fp4" and leaf.shape == (rows, 2 * columns[0])
        assert leaf.dtype == ("uint16" if storage == "bfloat16" else "float32")
    elif ".engram.embed." in weight.name:
        assert leaf.form == "stored" and leaf.dtype == "uint8" and leaf.shape == weight.shape
    elif weight.dtype == "F8_E4M3":
        assert leaf.form == "fp8" and leaf.dtype == storage and leaf.shape == weight.shape
    else:
        matrix = storage == "float32" and len(weight.shape) == 2 and weight.name != "embed.weight"
        assert leaf.form == "stored" and leaf.shape == weight.shape
        assert leaf.dtype == ("float32" if weight.dtype == "F32" or matrix else "bfloat16")


@pytest.mark.parametrize("unrolled", FORMS)
def test_stacks_are_in_the_order_of_layers_and_experts(config: ModelConfig, unrolled: bool):
    for leaf in all_leaves(leaf_tree(config, "packed", unrolled)):
        numbers = [tuple(int(part) for part in name.split(".") if part.isdigit()) for name in leaf.names]
        assert numbers == sorted(numbers)
        assert len({name.rsplit(".", 1)[-1] for name in leaf.names}) == 1
        assert leaf.lead_axes == ("layer", "expert")[: len(leaf.lead)] or leaf.lead_axes == ()
        if ".ffn.experts." in leaf.names[0]:
            assert leaf.lead == (len(leaf.names) // config.n_routed_experts, config.n_routed_experts)


@pytest.mark.parametrize("unrolled", FORMS)
def test_segments_cover_the_layers_in_order(config: ModelConfig, unrolled: bool):
    parts = segments(config, unrolled)
    assert [layer for part in parts for layer in part.layers] == list(range(config.n_layers))
    engram = {part.first: part.engram for part in parts if part.engram is not None}
    assert engram == {layer: place for place, layer in enumerate(config.engram.layers)}
    assert all(part.repeats == 1 or part.engram is None for part in parts), "memory is added before each unit"
    if unrolled:
        assert len(parts) == config.n_layers


# The released model.

WINDOW = LayerKind(0, 0, False, False, "none")
MAKES_PAIRS, READS_PAIRS = LayerKind(2, 0, True, True, "none"), LayerKind(2, 0, False, False, "none")
MAKES_ALL, USES = LayerKind(1, 1, True, True, "make"), LayerKind(1, 1, False, True, "use")
READS_ALL = LayerKind(1, 1, False, False, "none")


def test_segments_of_the_release(released: ModelConfig):
    """Spec section 1: index sources 2, 8, 14, then every fourth layer from 20 on; Engram at layers 1 and 14."""
    found = [
        (part.first, part.leader, part.follower, part.num_followers, part.repeats, part.engram)
        for part in segments(released, False)
    ]
    assert found == [
        (0, WINDOW, None, 0, 1, None),
        (1, WINDOW, None, 0, 1, 0),
        (2, MAKES_PAIRS, READS_PAIRS, 5, 2, None),
        (14, MAKES_PAIRS, READS_PAIRS, 5, 1, 1),
        (20, MAKES_ALL, READS_ALL, 3, 1, None),
        (24, USES, READS_ALL, 3, 4, None),
    ]


def test_sources_of_the_release(released: ModelConfig):
    """A layer reads the last KV source at or before it; numbers count within the sources of one ratio."""
    layout = cache_layout(released, with_draft=False)
    assert [(group.ratio, group.layers, group.rows_per_page) for group in layout.groups] == [
        (2, (2, 8, 14), 64),
        (1, (20,), 128),
    ]
    assert layout.num_window_layers == 40 and layout.page_size == 128
    assert cache_layout(released, with_draft=True).num_window_layers == 43
    numbers = [source_number(released, layer) for layer in range(released.n_layers)]
    assert numbers == [0, 0] + [0] * 6 + [1] * 6 + [2] * 6 + [0] * 20


def test_small_models_run_unrolled(released: ModelConfig, bench: ModelConfig, tiny_dir: Path):
    assert [is_unrolled(c) for c in (read(tiny_dir / "config.json"), bench, released)] == [True, True, False]
