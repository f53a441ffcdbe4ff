"""Logical axes become mesh axes by rule, and a wrong name is an error that shows what is known."""

import json
from importlib.resources import files

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rorqual.model.config import ModelConfig
from rorqual.model.declarations import declare
from rorqual.model.leaves import all_leaves
from rorqual.model.load import leaf_tree
from rorqual.serve.programs import leaf_spec
from rorqual.sharding.mesh import RANK, make_mesh
from rorqual.sharding.rules import REPLICATED, RULES, ShardingError, sharding_for, spec_for


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), PartitionSpec()),
        (("vocab", "dim"), PartitionSpec(None, None)),
        (("expert", "inter", "dim"), PartitionSpec(RANK, None, None)),
        (("layer", "expert", "dim", "inter"), PartitionSpec(None, RANK, None, None)),
        (("engram_row", None), PartitionSpec(RANK, None)),
        ((None, "seat", None, None), PartitionSpec(None, RANK, None, None)),
        ((None, "line", None), PartitionSpec(None, RANK, None)),
    ],
)
def test_specs(axes: tuple[str | None, ...], spec: PartitionSpec):
    assert spec_for(axes) == spec


@pytest.mark.parametrize("axis", sorted(RULES))
def test_what_a_rank_owns_lies_on_the_rank_axis(axis: str):
    assert spec_for((None, axis)) == PartitionSpec(None, RANK)


@pytest.mark.parametrize("axis", sorted(REPLICATED))
def test_what_every_rank_has_lies_nowhere(axis: str):
    assert spec_for((axis,)) == PartitionSpec(None)


def test_no_axis_is_both_split_and_replicated():
    assert not set(RULES) & REPLICATED


def test_a_typo_shows_the_axis_and_the_known_ones():
    with pytest.raises(ShardingError) as error:
        spec_for(("dim", "experts"))
    assert "axis 'experts' of ('dim', 'experts')" in str(error.value)
    for known in (*RULES, *REPLICATED):
        assert repr(known) in str(error.value)


def test_a_clash_shows_the_axes_and_the_rules():
    with pytest.raises(ShardingError) as error:
        spec_for(("expert", "dim", "seat"))
    assert "('expert', 'dim', 'seat')" in str(error.value)
    assert f"mesh axis {RANK!r}" in str(error.value)
    assert f"'expert': {RANK!r}" in str(error.value) and f"'seat': {RANK!r}" in str(error.value)


def test_rules_are_a_value():
    rules = {"dim": "model", "inter": None}
    assert spec_for(("inter", "dim"), rules) == PartitionSpec(None, "model")
    with pytest.raises(ShardingError, match="two of them go to mesh axis 'model'"):
        spec_for(("dim", "dim"), rules)
    with pytest.raises(ShardingError, match="axis 'seat'"):
        spec_for(("seat",), rules)


def test_a_mesh_has_one_axis_of_ranks():
    mesh = make_mesh(jax.devices()[:1])
    assert mesh.axis_names == (RANK,) and mesh.devices.shape == (1,)
    assert sharding_for(mesh, ("expert", None)) == NamedSharding(mesh, PartitionSpec(RANK, None))


def test_a_mesh_without_devices_is_refused():
    with pytest.raises(ValueError, match="devices: 0, allowed at least 1"):
        make_mesh([])


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(json.loads(files("rorqual.model").joinpath("released_config.json").read_text()))


def test_every_weight_of_the_release_has_a_rule(released: ModelConfig):
    for axes in {weight.axes for weight in declare(released).values()}:
        assert len(spec_for(axes)) == len(axes)


@pytest.mark.parametrize("unrolled", [True, False])
def test_just_experts_and_memory_rows_are_split(released: ModelConfig, unrolled: bool):
    """Dense weights are replicated; whatever the stacking, the split dim of experts is that of the 384."""
    for leaf in all_leaves(leaf_tree(released, "packed", unrolled)):
        spec = leaf_spec(leaf)
        experts = ".ffn.experts." in leaf.names[0]
        assert len(spec) == len(leaf.full_shape)
        assert (RANK in spec) == (experts or ".engram.embed." in leaf.names[0]), leaf.names[0]
        if experts:
            assert leaf.full_shape[tuple(spec).index(RANK)] == 384
