"""Whole prompts and the greedy replay through the backbone, by the `rounding` rule of golden/README.md.

A prompt and its greedy tokens are fed as one sequence: the logits of the prompt's positions are those of a prefill, and
from its last position on they are the ones that the greedy tokens were chosen from.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rorqual.cache.pools import abstract_pools
from rorqual.model.forward import Inputs, Params, Program, backbone, logits
from rorqual.model.layers.context import CacheState, Tables, Tokens
from rorqual.model.load import load_model

TOTAL = 176  # the longest prompt with its greedy tokens, in query tiles
NUM_PAGES = TOTAL // 16
PROMPTS = ("p0", "p1", "p2", "p3", "p4", "p5")
WIRED = ("wired.p2", "wired.p3", "wired.p4")

Goldens = dict[str, np.ndarray]
Run = Callable[[Params, np.ndarray], np.ndarray]


class Judged(NamedTuple):
    """A stretch of positions: logits found and golden, and the rounding of each position."""

    found: np.ndarray
    golden: np.ndarray
    rounding: np.ndarray

    @property
    def difference(self) -> np.ndarray:
        return np.abs(self.found - self.golden).max(1)


def patch_safetensors(path: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    """Rewrite a file in place: `change` takes name and bytes of a tensor and gives new bytes, or None to keep them."""
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        new = change(name, np.frombuffer(bytes(raw[start:end]), np.uint8))
        if new is not None:
            raw[start:end] = np.ascontiguousarray(new).tobytes()
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def wired_dir(tiny_dir: Path, tiny: Goldens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint whose stream copies drift apart."""
    folder = tmp_path_factory.mktemp("wired") / "wired"
    shutil.copytree(tiny_dir, folder)

    def change(name: str, old: np.ndarray) -> np.ndarray | None:
        if not name.startswith("layers."):
            return None
        if name.endswith((".hc_attn_base", ".hc_ffn_base")):
            return tiny["wired.hc_base"][int(name.split(".")[1]), int("ffn" in name)].view(np.uint8)
        if name.endswith(".attn.wo_b.scale"):
            return old + np.uint8(3)
        return old + np.uint8(4) if ".ffn." in name and name.endswith(".w2.scale") else None

    for shard in folder.glob("*.safetensors"):
        patch_safetensors(shard, change)
    return folder


@pytest.fixture(
    scope="module", params=[("float32", True), ("packed", False)], ids=["float32-unrolled", "packed-scanned"]
)
def form(request: pytest.FixtureRequest) -> dict:
    storage, unrolled = request.param
    return {"storage": storage, "unrolled": unrolled, "progress": False}


@pytest.fixture(scope="module")
def tiny_model(tiny_dir: Path, form: dict) -> tuple[Params, Program]:
    return load_model(tiny_dir, **form)


def prompt_inputs(ids: np.ndarray) -> Inputs:
    """One row from position 0 in a step of TOTAL entries; pages in reverse."""
    place = np.arange(TOTAL)
    valid = place < len(ids)
    tokens = Tokens(
        jnp.asarray(np.pad(ids, (0, TOTAL - len(ids)))),
        jnp.asarray(np.where(valid, place, 0), jnp.int32),
        jnp.zeros(TOTAL, jnp.int32),
        jnp.asarray(valid & (place > 0)),
        jnp.asarray(place == len(ids) - 1),
        jnp.asarray(valid),
        jnp.zeros(TOTAL, bool),
    )
    pages = jnp.arange(NUM_PAGES, dtype=jnp.int32)[None]
    return Inputs(tokens, Tables(pages[:, ::-1], jnp.roll(pages, 3, 1)), jnp.full((TOTAL, 3), -1, jnp.int32))


@pytest.fixture(scope="module")
def run(tiny_model: tuple[Params, Program]) -> Run:
    """Weights and ids -> logits of every position; one program for all prompts."""
    program = tiny_model[1]
    shapes = abstract_pools(program.layout, NUM_PAGES, NUM_PAGES)

    @jax.jit
    def step(params: Params, inputs: Inputs) -> jax.Array:
        pools = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        state = CacheState(pools, jnp.zeros((2, 1, 2, program.layout.kv_dim)))
        return logits(params, backbone(params, state, inputs, program)[0], jnp.sum(inputs.tokens.valid), program)

    return lambda params, ids: np.asarray(step(params, prompt_inputs(ids)))[: len(ids)]


@pytest.fixture(scope="module")
def judged(
    tiny_model: tuple[Params, Program], run: Run, wired_dir: Path, form: dict, tiny: Goldens
) -> dict[str, Judged]:
    """Every prompt, replay and wired prompt."""
    results = {}
    for name in PROMPTS:
        ids, greedy = tiny[f"{name}.ids"], tiny[f"{name}.greedy"]
        found = run(tiny_model[0], np.concatenate([ids, greedy[:-1]]))
        results[name] = Judged(found[: len(ids)], tiny[f"{name}.logits"], tiny[f"{name}.rounding"])
        replay = tiny[f"{name}.greedy_logits"], tiny[f"{name}.greedy_rounding"]
        results[f"{name}.greedy"] = Judged(found[len(ids) - 1 :], *replay)
    wired_params = load_model(wired_dir, **form)[0]
    for name in WIRED:
        found = run(wired_params, tiny[f"{name.removeprefix('wired.')}.ids"])
        results[name] = Judged(found, tiny[f"{name}.logits"], tiny[f"{name}.rounding"])
    return results


@pytest.mark.parametrize("name", [*PROMPTS[1:], *WIRED])
def test_median_difference_is_rounding(judged: dict[str, Judged], name: str):
    part = judged[name]
    ratio = np.median(part.difference) / np.median(part.rounding)
    print(f"{name}: median difference {np.median(part.difference):.4f}, {ratio:.3f} of the median rounding")
    assert ratio <= 1.25


def test_few_positions_exceed_twice_their_rounding(judged: dict[str, Judged]):
    difference = np.concatenate([part.difference for part in judged.values()])
    rounding = np.concatenate([part.rounding for part in judged.values()])
    assert len(difference) == 583  # all of the README's 608 but the 25 of the image prompt
    above = int(np.sum(difference > 2 * rounding))
    print(f"{above} of {len(difference)} positions above twice their rounding")
    assert above <= 0.01 * len(difference)


def test_best_token_is_the_golden_one_where_the_margin_is_clear(judged: dict[str, Judged]):
    num_clear = 0
    for name, part in judged.items():
        best_two = np.sort(part.golden, 1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > 2 * part.rounding
        num_clear += int(clear.sum())
        wrong = np.flatnonzero(clear & (part.found.argmax(1) != part.golden.argmax(1)))
        assert not len(wrong), (name, wrong.tolist())
    print(f"{num_clear} positions with a clear margin")
    assert num_clear > 100
