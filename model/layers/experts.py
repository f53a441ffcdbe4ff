"""Mixture of experts: router, routed experts, shared expert (spec section 7)."""

import jax
import jax.numpy as jnp
from flax import nnx

from rorqual.model.config import ModelConfig
from rorqual.model.kernels.grouped_experts.reference import grouped_experts, swiglu
from rorqual.model.layers.linear import Fp8Linear, Weights, unpack_fp4
from rorqual.model.numerics import BF16, F32, bf16, dot
from rorqual.model.quantise import fp8_roundtrip

MAX_EXPERT_TILE = 64


def best_first(scores: jax.Array, k: int) -> jax.Array:
    """Places of the k largest of float32 `[t, n]`, best first, ties to the lower place -> int32 `[t, k]`."""
    chosen = []
    places = jnp.arange(scores.shape[1])
    for _ in range(k):
        best = jnp.argmax(scores, 1).astype(jnp.int32)
        chosen.append(best)
        scores = jnp.where(places == best[:, None], -jnp.inf, scores)
    return jnp.stack(chosen, 1)


class Router(nnx.Module):
    """noaux_tc: experts chosen by biased scores, weighted by unbiased ones; image tokens use `bias_vl`."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.weight = nnx.Param(weights["weight"])
        self.bias = nnx.Param(weights["bias"])
        self.bias_vl = nnx.Param(weights["bias_vl"])
        self.config = config

    def scores(self, x: jax.Array) -> jax.Array:
        """`[t, D]` -> float32 `[t, E]`: sqrt(softplus(logits))."""
        return jnp.sqrt(jax.nn.softplus(dot(x, self.weight[...]) / self.config.gate_temp))

    def __call__(self, x: jax.Array, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`x [t, D]`, `image [t]` bool -> (experts int32 `[t, k]`, best first, weights float32 `[t, k]`)."""
        scores = self.scores(x)
        biased = scores + jnp.where(image[:, None], self.bias_vl[...], self.bias[...])
        experts = best_first(biased, self.config.n_activated_experts)
        weights = jnp.take_along_axis(scores, experts, 1)
        if self.config.norm_topk_prob and self.config.n_activated_experts > 1:
            weights = weights / (jnp.sum(weights, 1, keepdims=True) + 1e-20)
        return experts, weights * self.config.route_scale


class RoutedLinear(nnx.Module):
    """One matrix of all experts of a stack of layers: packed FP4 `[layers, E, out, in/2]` with scales, or dequantised
    `[layers, E, out, in]`, float32 or the bits of bfloat16."""

    def __init__(self, weights: Weights):
        self.weight = nnx.Param(weights["weight"])
        self.scale = nnx.Param(weights["scale"]) if "scale" in weights else None

    def dense(self, stack: jax.Array, expert: jax.Array) -> jax.Array:
        """Weight `[out, in]` of one expert of one layer (traced numbers)."""
        weight = _matrix(self.weight[...], stack, expert)
        if self.scale is not None:
            return unpack_fp4(weight, _matrix(self.scale[...], stack, expert))
        return jax.lax.bitcast_convert_type(weight, BF16) if weight.dtype == jnp.uint16 else weight


def _matrix(stacked: jax.Array, stack: jax.Array, expert: jax.Array) -> jax.Array:
    """One `[out, in]` of `[layers, E, out, in]`."""
    zero = jnp.zeros((), jnp.int32)
    matrix = jax.lax.dynamic_slice(stacked, (stack, expert, zero, zero), (1, 1, *stacked.shape[2:]))
    return matrix.reshape(stacked.shape[2:])


class RoutedExperts(nnx.Module):
    """All routed experts of a stack of layers."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.w1 = RoutedLinear(weights["w1"])
        self.w2 = RoutedLinear(weights["w2"])
        self.w3 = RoutedLinear(weights["w3"])
        self.config = config

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array, stack: jax.Array, tile: int) -> jax.Array:
        """Tokens `[T, D]` (FP8 round-tripped), routing `[T, k]`, place in the stack -> results by slot `[T, k, D]`."""
        matrices = self.w1, self.w2, self.w3

        def of_expert(expert: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            w1, w2, w3 = (matrix.dense(jnp.asarray(stack, jnp.int32), expert) for matrix in matrices)
            return w1, w2, w3

        num_experts = self.w1.weight[...].shape[1]
        return grouped_experts(x, experts, weights, of_expert, num_experts, tile, self.config.swiglu_limit)


class SharedExpert(nnx.Module):
    """FP8 expert that every token visits, without a routing weight."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.w1 = Fp8Linear(weights["w1"])
        self.w2 = Fp8Linear(weights["w2"])
        self.w3 = Fp8Linear(weights["w3"])
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[t, D]` (FP8 round-tripped) -> bfloat16 `[t, D]`."""
        gate, up = self.w1(x).astype(F32), self.w3(x).astype(F32)
        return self.w2(fp8_roundtrip(bf16(swiglu(gate, up, self.limit))))


class Experts(nnx.Module):
    """The MoE sublayer in three steps: route (per token), compute (grouped by expert), combine (per token)."""

    def __init__(self, weights: Weights, config: ModelConfig):
        self.gate = Router(weights["gate"], config)
        self.experts = RoutedExperts(weights["experts"], config)
        self.shared_experts = SharedExpert(weights["shared_experts"], config)

    def combine(self, x: jax.Array, routed: jax.Array) -> jax.Array:
        """`x [t, D]` (FP8 round-tripped), results by slot `[t, k, D]` -> bfloat16 `[t, D]`.

        Summed in float32 in slot order, the shared expert last, one cast.
        """
        total = routed[:, 0].astype(F32)
        for slot in range(1, routed.shape[1]):
            total = total + routed[:, slot].astype(F32)
        return bf16(total + self.shared_experts(x).astype(F32))


def expert_tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of an expert tile when speed alone decides: about the pairs an expert gets, a power of two."""
    wanted = -(-num_pairs // num_experts)
    return min(1 << (wanted - 1).bit_length(), MAX_EXPERT_TILE)
