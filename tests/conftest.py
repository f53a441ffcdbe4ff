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
