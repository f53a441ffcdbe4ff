"""Shared fixtures: the golden data."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file. The library's numpy reader does not know the E8M0 type, so the header is read here."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + length + start : 8 + length + end], DTYPES[entry["dtype"]])
        tensors[name] = data.reshape(entry["shape"])
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)).get("__metadata__", {})


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return GOLDEN / "tiny"


@pytest.fixture(scope="session")
def ops() -> dict[str, np.ndarray]:
    """Operator goldens of both files (their names do not clash)."""
    return read_safetensors(GOLDEN / "ops_goldens.safetensors") | read_safetensors(GOLDEN / "ops2_goldens.safetensors")


@pytest.fixture(scope="session")
def tiny() -> dict[str, np.ndarray]:
    """Prompts and results for golden/tiny, with the inner steps of p3."""
    return read_safetensors(GOLDEN / "tiny_goldens.safetensors") | read_safetensors(GOLDEN / "ops2_goldens.safetensors")


@pytest.fixture(scope="session")
def release() -> dict[str, np.ndarray]:
    return read_safetensors(GOLDEN / "release_goldens.safetensors")


# Engines are what tests spend their time on (each step program is compiled for about ten seconds), so they are shared.
COMPILE_CACHE = Path(__file__).parent.parent / ".cache" / "test-programs"
TINY_OPTIONS = {"context": 512, "max_rows": 8, "step_tokens": 64, "memory_gb": 1.0, "weights": "float32"}


@pytest.fixture(scope="session")
def tiny_llm(tiny_dir):
    """golden/tiny in normal mode: steps of 16 and 64 tokens, 8 rows."""
    from rorqual.serve import LLM

    with LLM(tiny_dir, compile_cache=COMPILE_CACHE, progress=False, **TINY_OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiled_llm(tiny_dir):
    """golden/tiny with row tiles of 16: results do not depend on batch, bucket and chunk."""
    from rorqual.serve import LLM

    with LLM(tiny_dir, compile_cache=COMPILE_CACHE, progress=False, row_tile=16, **TINY_OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_dir(tmp_path_factory) -> Path:
    """A demo checkpoint."""
    from rorqual.model.demo import write_demo_checkpoint

    folder = tmp_path_factory.mktemp("demo") / "demo"
    write_demo_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def demo_llm(demo_dir):
    """The demo model as a server would run it, smaller: 64 rows, steps of 16, 64 and 256 tokens."""
    from rorqual.serve import LLM

    options = {"context": 4096, "max_rows": 64, "step_tokens": 256, "memory_gb": 4.0}
    with LLM(demo_dir, compile_cache=COMPILE_CACHE, progress=False, strict_compiles=True, **options) as llm:
        yield llm
