"""How the layers of a config group into kinds, and the kinds into segments that one traced body serves."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rorqual.cache.layout import CacheLayout, SourceGroup
from rorqual.model.config import ModelConfig

Candidates = Literal["none", "make", "use"]


@dataclass(frozen=True)
class LayerKind:
    """What a layer is, apart from its weights and its number. Equal kinds share one traced body.

    `ratio` of the compressed KV it reads (0: window only), `pool`: place of that ratio in the layout's groups.
    """

    ratio: int
    pool: int
    owns_kv: bool
    indexes: bool
    candidates: Candidates


class LayerNumbers(NamedTuple):
    """Numbers of a layer that its kind does not fix (traced inside a scan): the layer, the KV source it reads among
    those of its ratio, and its place in the stack of weights that holds it."""

    layer: Any
    source: Any
    stack: Any


@dataclass(frozen=True)
class Segment:
    """`repeats` times a unit of layers: a leader, then `followers` layers of one kind. Begins at layer `first`."""

    first: int
    leader: LayerKind
    follower: LayerKind | None
    num_followers: int
    repeats: int
    engram: int | None  # place among the Engram layers: memory is added before the segment's first layer

    @property
    def unit(self) -> int:
        return 1 + self.num_followers

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.unit * self.repeats)


def source_groups(config: ModelConfig) -> tuple[SourceGroup, ...]:
    """KV sources by ratio, larger ratios first."""
    ratios = sorted({config.ratio(layer) for layer in config.kv_source_layers}, reverse=True)
    return tuple(
        SourceGroup(
            ratio,
            tuple(layer for layer in config.kv_source_layers if config.ratio(layer) == ratio),
            config.window_size // ratio,
        )
        for ratio in ratios
    )


def cache_layout(config: ModelConfig, with_draft: bool) -> CacheLayout:
    """Pages and rows of this model; draft layers have windows like any other."""
    drafts = config.draft.n_layers if with_draft and config.draft is not None else 0
    return CacheLayout(
        config.window_size, config.n_layers + drafts, config.head_dim, config.index_head_dim, source_groups(config)
    )


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Kind of a backbone layer."""
    ratio = config.ratio(layer)
    if not ratio:
        return LayerKind(0, 0, False, False, "none")
    indexes = layer in config.index_source_layers
    candidates: Candidates = "none"
    if indexes and 0 <= config.candidate_source_layer:
        if layer == config.candidate_source_layer:
            candidates = "make"
        elif layer > config.candidate_source_layer:
            candidates = "use"
    ratios = [group.ratio for group in source_groups(config)]
    return LayerKind(ratio, ratios.index(ratio), layer in config.kv_source_layers, indexes, candidates)


def source_number(config: ModelConfig, layer: int) -> int:
    """Place of the layer's KV source among the sources of its ratio (0 for window-only layers)."""
    source = config.kv_source_of(layer)
    if source is None:
        return 0
    group = next(group for group in source_groups(config) if source in group.layers)
    return group.layers.index(source)


def _units(config: ModelConfig) -> list[Segment]:
    """Leader and followers: a new unit starts at an index source, at an Engram layer, or where the kind changes."""
    units: list[Segment] = []
    for layer in range(config.n_layers):
        kind = layer_kind(config, layer)
        engram = config.engram.layers.index(layer) if layer in config.engram.layers else None
        last = units[-1] if units else None
        follows = last is not None and not kind.indexes and engram is None and last.leader.ratio == kind.ratio
        if not follows or last is None:
            units.append(Segment(layer, kind, None, 0, 1, engram))
        else:
            units[-1] = Segment(last.first, last.leader, kind, last.num_followers + 1, 1, last.engram)
    return units


def segments(config: ModelConfig, unrolled: bool) -> tuple[Segment, ...]:
    """The layers as segments. Unrolled: every layer a segment of its own, so that its weights are leaves of their own.

    Otherwise equal neighbouring units become one segment that repeats: a scan over units, in it a scan over followers.
    """
    if unrolled:
        return tuple(
            Segment(
                layer,
                layer_kind(config, layer),
                None,
                0,
                1,
                config.engram.layers.index(layer) if layer in config.engram.layers else None,
            )
            for layer in range(config.n_layers)
        )
    merged: list[Segment] = []
    for _, group in groupby(_units(config), key=lambda u: (u.leader, u.follower, u.num_followers, u.engram)):
        units = list(group)
        first = units[0]
        merged.append(Segment(first.first, first.leader, first.follower, first.num_followers, len(units), first.engram))
    return tuple(merged)
