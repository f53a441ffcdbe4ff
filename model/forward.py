"""The backbone: embedding, Engram, layers, final norm; and the LM head. One rank's program, pure functions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from rorqual.cache.layout import CacheLayout
from rorqual.model.config import ModelConfig
from rorqual.model.kernels.hyper_connections.reference import narrow
from rorqual.model.layers.block import Block, Hidden, TileSizes
from rorqual.model.layers.context import CacheState, Tables, Tokens
from rorqual.model.layers.engram import DEAD, Engram, HashConstants, lookback_ids, ngram_rows
from rorqual.model.layers.indexer import Selection
from rorqual.model.layers.kinds import LayerKind, LayerNumbers, Segment, source_number
from rorqual.model.layers.linear import Linear, RMSNorm
from rorqual.model.layers.tiles import over_tiles, put, take
from rorqual.model.numerics import BF16, F32

Params = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """What is static about the model inside a step: config, cache geometry, how layers are grouped, tile sizes.

    Hashable, so that it can be a static argument of the jitted step. `graphs` holds the structure of every part, split
    from its weights once; the weights travel as plain pytrees.
    """

    config: ModelConfig
    layout: CacheLayout
    segments: tuple[Segment, ...]
    graphs: tuple[tuple[str, Any], ...]
    hashes: tuple[HashConstants, ...]
    tile_rows: int  # rows of a token tile; 0: the whole step is one tile
    expert_rows: int  # rows of an expert tile; 0: by the number of tokens

    def part(self, name: str, leaves: Any) -> Any:
        """The module of a part with its weights put back."""
        return nnx.merge(dict(self.graphs)[name], leaves)

    @property
    def tiles(self) -> TileSizes:
        return TileSizes(self.tile_rows or None, self.expert_rows)


class Inputs(NamedTuple):
    """Tokens of a step with what the layers before them left: page tables, and by token the ids before its row."""

    tokens: Tokens
    tables: Tables
    history: jax.Array  # int32 [T, max_ngram - 1] token ids before the row's first token, newest first, -1: none


def graph_name(kind: LayerKind) -> str:
    return f"block {kind}"


def compressed_ids(token: jax.Array, token_map: jax.Array, image_token_id: int) -> jax.Array:
    """Token ids (-1: none) -> compressed ids, DEAD for image tokens and none."""
    dead = (token < 0) | (token == image_token_id)
    return jnp.where(dead, DEAD, token_map[jnp.maximum(token, 0)])


def engram_ids(params: Params, inputs: Inputs, program: Program) -> jax.Array:
    """Compressed ids of each token and its predecessors, newest first: int32 `[T, max_ngram]`."""
    config, token_map = program.config, params["engram"]["token_map"]
    ids = compressed_ids(inputs.tokens.token, token_map, config.image_token_id)
    history = compressed_ids(inputs.history, token_map, config.image_token_id)
    return lookback_ids(ids, inputs.tokens.follows, history)


def add_memory(params: Params, hidden: Hidden, ids: jax.Array, inputs: Inputs, place: int, program: Program) -> Hidden:
    """The Engram addition before layer `config.engram.layers[place]`."""
    config = program.config
    engram: Engram = program.part("engram", params["engram"]["layers"][place])
    pad = params["engram"]["token_map"][config.engram.pad_id]
    tile = program.tiles.rows

    def one_tile(start: jax.Array, stream: jax.Array) -> jax.Array:
        part, lookback, image = take((stream, ids, inputs.tokens.image), start, tile)
        rows = engram.embed(ngram_rows(lookback, pad, program.hashes[place], config.engram.n_heads))
        return put(stream, engram(part, rows, ~image), start)

    stream = over_tiles(jnp.sum(inputs.tokens.valid), tile, one_tile, hidden.stream)
    return Hidden(stream, hidden.pre)


def embed(params: Params, inputs: Inputs, config: ModelConfig) -> Hidden:
    """Embedding rows repeated over the copies; the first pre-mix takes copy 0."""
    rows = jnp.take(params["embed"]["weight"], inputs.tokens.token, 0).astype(BF16)
    copies = config.hc_mult
    pre = jnp.zeros((rows.shape[0], copies), F32).at[:, 0].set(1)
    return Hidden(jnp.broadcast_to(rows[:, None], (rows.shape[0], copies, rows.shape[1])), pre)


def _segment_numbers(config: ModelConfig, segment: Segment) -> LayerNumbers:
    """Numbers of a segment's layers, int32 `[repeats, unit]` each."""
    shape = (segment.repeats, segment.unit)
    layers = np.array(segment.layers, np.int32).reshape(shape)
    sources = np.array([source_number(config, layer) for layer in segment.layers], np.int32).reshape(shape)
    repeat, place = np.indices(shape, np.int32)
    stack = np.where(place == 0, repeat, repeat * segment.num_followers + place - 1)
    return LayerNumbers(layers, sources, stack)


def layer_leaves(stacked: Any, stack: jax.Array) -> Any:
    """One layer's leaves out of a stack. Routed experts stay whole: a tile reads just the expert it works for, where
    a slice here would copy the experts of a layer."""
    experts = stacked["ffn"]["experts"]
    dense = {**stacked, "ffn": {key: value for key, value in stacked["ffn"].items() if key != "experts"}}

    def one(leaf: jax.Array) -> jax.Array:
        return leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, stack, 0, keepdims=False)

    leaves = jax.tree.map(one, dense)
    leaves["ffn"]["experts"] = experts
    return leaves


def run_segment(params: Any, segment: Segment, carry: tuple, inputs: Inputs, program: Program) -> tuple:
    """`carry` = (hidden, selection, cache state) through the layers of a segment."""
    tile = program.tiles

    def one_layer(carry: tuple, stacked: Any, kind: LayerKind, numbers: LayerNumbers) -> tuple:
        block: Block = program.part(graph_name(kind), layer_leaves(stacked, numbers.stack))
        hidden, chosen, state = carry
        return block(hidden, chosen, state, inputs.tokens, inputs.tables, numbers, tile)

    def one_unit(carry: tuple, numbers: LayerNumbers) -> tuple:
        first, rest = jax.tree.map(lambda n: n[0], numbers), jax.tree.map(lambda n: n[1:], numbers)
        carry = one_layer(carry, params["leader"], segment.leader, first)
        follower = segment.follower
        if follower is None:
            return carry
        return lax.scan(lambda c, n: (one_layer(c, params["followers"], follower, n), None), carry, rest)[0]

    numbers = jax.tree.map(jnp.asarray, _segment_numbers(program.config, segment))
    if segment.repeats == 1:
        return one_unit(carry, jax.tree.map(lambda n: n[0], numbers))
    return lax.scan(lambda c, n: (one_unit(c, n), None), carry, numbers)[0]


def empty_selection(total: int, config: ModelConfig) -> Selection:
    """Nothing chosen yet."""
    return Selection(
        jnp.full((total, config.index_topk), -1, jnp.int32),
        jnp.full((total, config.candidate_topk_blocks), -1, jnp.int32),
    )


def backbone(params: Params, state: CacheState, inputs: Inputs, program: Program) -> tuple[Hidden, CacheState]:
    """Every token of the step through all layers: the stream after the last one, and the cache with its rows."""
    config = program.config
    hidden = embed(params, inputs, config)
    ids = engram_ids(params, inputs, program)
    carry = (hidden, empty_selection(inputs.tokens.token.shape[0], config), state)
    for segment, leaves in zip(program.segments, params["layers"], strict=True):
        if segment.engram is not None:
            carry = (add_memory(params, carry[0], ids, inputs, segment.engram, program), *carry[1:])
        carry = run_segment(leaves, segment, carry, inputs, program)
    return carry[0], carry[2]


def logits(params: Params, hidden: Hidden, num_rows: jax.Array, program: Program) -> jax.Array:
    """Stream and last pre-mix of n rows, the first `num_rows` of them real -> float32 logits `[n, vocab]`."""
    norm: RMSNorm = program.part("norm", params["norm"])
    head: Linear = program.part("head", params["head"])
    total = hidden.pre.shape[0]
    tile = program.tiles.rows

    def one_tile(start: jax.Array, result: jax.Array) -> jax.Array:
        part = take(hidden, start, tile)
        return put(result, head.wide(norm(narrow(part.stream, part.pre))), start)

    empty = jnp.zeros((total, program.config.vocab_size), F32)
    return over_tiles(num_rows, tile, one_tile, empty)
