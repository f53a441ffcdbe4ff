"""The repository keeps its house rules, and the checker finds what breaks them."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load_checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_house_rules", Path(__file__).parent / "check_house_rules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = _load_checker()

PROJECT = """
[project]
dependencies = ["numpy>=2"]
[project.optional-dependencies]
test = ["pytest>=9"]
dev = []
[tool.setuptools]
packages = ["rorqual.cache", "rorqual.model", "rorqual.serve", "rorqual.sharding"]
"""


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A small repository that breaks no rule."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text(
        "numpy==2.4.6 ; python_version < '3.12'\nnumpy==2.5.5 ; python_version >= '3.12'\npytest==9.2.0\n"
    )
    for package in checker.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "py.typed").touch()
    (tmp_path / "tests").mkdir()
    return tmp_path


def test_the_repository_keeps_the_rules() -> None:
    assert checker.find_violations(ROOT) == []


def test_a_clean_tree_has_no_violation(clean: Path) -> None:
    assert checker.find_violations(clean) == []


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("model/long.py", "x = 1\n" * 601, "601 lines, allowed 600"),
        ("model/long.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines, allowed 60"),
        ("tests/test_long.py", "async def f():\n" + "    x = 1\n" * 60, "f has 61 lines, allowed 60"),
        ("model/utils.py", "", "name the file after what it does"),
        ("cache/pages.py", "class PageManager:\n    pass\n", "class PageManager: say what it does"),
        ("model/__init__.py", "x = 1\n", "model/__init__.py:1: must be empty"),
        ("serve/__init__.py", "from rorqual.serve import llm\n", "only __all__ and a lazy __getattr__"),
        ("serve/a.py", "import os\nx = os.environ['X']\n", "serve/a.py:2: settings do not come from"),
        ("serve/a.py", "from os import getenv\n", "serve/a.py:1: settings do not come from"),
        ("serve/a.py", "f(1, envvar='X')\n", "serve/a.py:1: settings do not come from"),
        ("model/a.py", "# TO" + "DO: later\n", "do it or file it"),
        ("README.md", "see /ho" + "me/me/notes\n", "is a path of one machine"),
        ("model/kernels/a.py", "", "model/kernels: has no __init__.py"),
        ("model/kernels/__init__.py", "", "rorqual.model.kernels is missing"),
        ("tests/__init__.py", "", "tests are no package"),
    ],
)
def test_a_violation_is_found(clean: Path, file: str, text: str, found: str) -> None:
    (clean / file).parent.mkdir(parents=True, exist_ok=True)
    (clean / file).write_text(text)
    assert [violation for violation in checker.find_violations(clean) if found in violation]


@pytest.mark.parametrize(
    ("pins", "found"),
    [
        ("pytest==9.2.0\n", "numpy needs one version for every interpreter"),
        ("numpy==2.4.6 ; python_version < '3.12'\npytest==9.2.0\n", "numpy needs one version"),
        ("numpy==2.4.6\npytest>=9\n", "constraints.txt:2: 'pytest>=9' is not of the form"),
        ("--index-url https://example.org\nnumpy==2.4.6\npytest==9.2.0\n", "constraints.txt:1: "),
    ],
)
def test_an_unpinned_dependency_is_found(clean: Path, pins: str, found: str) -> None:
    (clean / "constraints.txt").write_text(pins)
    assert [violation for violation in checker.find_violations(clean) if found in violation]


def test_the_public_package_may_load_its_classes_lazily(clean: Path) -> None:
    (clean / "serve" / "__init__.py").write_text(
        '"""Public names."""\n'
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from rorqual.serve.llm import LLM\n"
        "__all__ = ['LLM']\n"
        "def __getattr__(name: str) -> object:\n    from rorqual.serve import llm\n    return getattr(llm, name)\n"
    )
    assert checker.find_violations(clean) == []


def test_a_listed_package_must_exist(clean: Path) -> None:
    (clean / "pyproject.toml").write_text(PROJECT.replace('"rorqual.serve"', '"rorqual.serve", "rorqual.serve.gone"'))
    assert checker.find_violations(clean) == [
        "pyproject.toml: rorqual.serve.gone is listed, but there is no such folder"
    ]


HOST_IMPORTS = """
import importlib, pkgutil, sys
for name in ("jax", "jaxlib", "flax", "orbax"):
    sys.modules[name] = None  # any import of it raises
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for entry in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(entry.name)
"""


def test_the_host_plane_imports_without_jax() -> None:
    """What the import contract says of our own files holds with the libraries that they load, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (host_plane,) = [contract for contract in contracts if "jax" in contract.get("forbidden_modules", [])]
    command = [sys.executable, "-c", HOST_IMPORTS, *host_plane["source_modules"]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
