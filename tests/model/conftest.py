"""Fixtures of the model tests."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

ENGRAM_ROW = {"weight": ((256,), "float8_e4m3fn"), ".scale": ((8,), "float8_e8m0fnu")}


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rules() -> ModuleType:
    """golden_rules.py: how results are judged."""
    return _load_module(Path(__file__).with_name("golden_rules.py"))


@pytest.fixture(scope="session")
def release_weights() -> ModuleType:
    """The script that makes weights of released shapes from their names."""
    return _load_module(Path(__file__).parents[1] / "tools" / "release_weights.py")


@pytest.fixture(scope="session")
def judge(rules: ModuleType, release: dict[str, np.ndarray], golden_dir: Path) -> Any:
    """ReleaseRules: results at released sizes against the goldens, by the tolerances stored beside them."""
    raw = (golden_dir / "release_goldens.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return rules.ReleaseRules(header["__metadata__"], release)


@pytest.fixture(scope="session")
def weights(release_weights: ModuleType) -> Callable[[str], Any]:
    """Packed leaves below a name of the released checkpoint (a tree, or one array), made by rule."""

    def make(name: str) -> np.ndarray:
        shape, dtype = release_weights.CHECK[name][:2] if name in release_weights.CHECK else ENGRAM_ROW[name[-6:]]
        codes = release_weights.codes(name, shape, dtype)
        return codes.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else codes

    def leaves(prefix: str) -> Any:
        if ".embed.row." in prefix:
            return {"weight": make(prefix + "weight"), "scale": make(prefix + "scale")}
        tree: dict[str, Any] = {}
        for name in release_weights.CHECK:
            if name == prefix:
                return make(name)
            if name.startswith(prefix):
                *path, last = name[len(prefix) :].split(".")
                branch = tree
                for key in path:
                    branch = branch.setdefault(key, {})
                branch[last] = make(name)
        assert tree, f"no weights below {prefix}"
        return tree

    return leaves
