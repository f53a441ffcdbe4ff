"""The rules that no tool on the shelf checks: sizes, names, empty package files, the list of packages.

Run as a script it prints every violation and exits with 1 if there is one. Only the standard library is needed.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("cache", "model", "serve", "sharding")
CODE_FOLDERS = (*PACKAGES, "tests", "notebooks")
# Data and the scripts that made it: kept byte for byte.
KEPT_AS_THEY_ARE = ("tests/golden", "tests/tools")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".ipynb", ".yml", ".yaml"}
EXTRA_TEXT_FILES = ("Makefile", ".ci/run")

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FORBIDDEN_FILE_NAMES = {"util.py", "utils.py", "helper.py", "helpers.py", "misc.py"}
FORBIDDEN_CLASS_WORDS = ("Manager", "Helper", "Mixin")
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# In two halves, so that this file passes its own check.
REMINDER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
# An absolute path that exists on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w.$})/:])/(?:home|root|tmp|Users|work)\b(?![.-])")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9._]+)(?: ; python_version (<|>=) '([0-9.]+)')?$")


def find_violations(root: Path) -> list[str]:
    """All violations below a repository root, each as `path[:line]: what is wrong`."""
    found: list[str] = []
    for path in _text_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        found += _text_violations(name, text)
        if path.suffix == ".py":
            found += _code_violations(name, text)
    found += _package_violations(root)
    found += _pin_violations(root)
    return found


def _text_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path
    for name in EXTRA_TEXT_FILES:
        if (root / name).is_file():
            yield root / name
    for folder in (*CODE_FOLDERS, "docs"):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in TEXT_SUFFIXES and not name.startswith(KEPT_AS_THEY_ARE) and "/." not in name:
                yield path


def _text_violations(name: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES and not name.endswith(".ipynb"):
        yield f"{name}: {len(lines)} lines, allowed {MAX_FILE_LINES}"
    for number, line in enumerate(lines, start=1):
        if match := REMINDER.search(line):
            yield f"{name}:{number}: {match.group()}: do it or file it"
        if match := MACHINE_PATH.search(line):
            yield f"{name}:{number}: {match.group()} is a path of one machine"


def _code_violations(name: str, text: str) -> Iterator[str]:
    file_name = name.rsplit("/", 1)[-1]
    in_package = name.split("/", 1)[0] in PACKAGES
    if file_name in FORBIDDEN_FILE_NAMES:
        yield f"{name}: name the file after what it does"
    if name.startswith("tests/") and file_name == "__init__.py":
        yield f"{name}: tests are no package"
    tree = ast.parse(text, filename=name)
    if in_package and file_name == "__init__.py":
        yield from _init_violations(name, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {num_lines} lines, allowed {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef) and any(word in node.name for word in FORBIDDEN_CLASS_WORDS):
            yield f"{name}:{node.lineno}: class {node.name}: say what it does"
        if in_package and _reads_environment(node):
            yield f"{name}:{node.lineno}: settings do not come from the environment"


def _init_violations(name: str, tree: ast.Module) -> Iterator[str]:
    """Package files are empty. serve/__init__.py alone may name its public classes, and must load them lazily."""
    if name != "serve/__init__.py":
        if tree.body:
            yield f"{name}:{tree.body[0].lineno}: must be empty"
        return
    for node in tree.body:
        from_typing = isinstance(node, ast.ImportFrom) and node.module == "typing"
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        value = isinstance(node, ast.Assign | ast.AnnAssign) or _is_docstring(node)
        if not (from_typing or for_types or lazy or value):
            yield f"{name}:{node.lineno}: only __all__ and a lazy __getattr__ are allowed here"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in ENVIRONMENT_NAMES
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
    # The command line library can read its options from there too.
    return isinstance(node, ast.Call) and any(keyword.arg == "envvar" for keyword in node.keywords)


def _package_violations(root: Path) -> Iterator[str]:
    """Every folder with code is a package, and pyproject.toml lists it: what is not listed is not installed."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    existing = set()
    for top in PACKAGES:
        for folder in sorted({path.parent for path in (root / top).rglob("*.py")}):
            name = folder.relative_to(root).as_posix()
            existing.add("rorqual." + name.replace("/", "."))
            if not (folder / "__init__.py").is_file():
                yield f"{name}: has no __init__.py"
        if not (root / top / "py.typed").is_file():
            yield f"{top}: has no py.typed"
    for package in sorted(existing - listed):
        yield f"pyproject.toml: {package} is missing under tool.setuptools.packages"
    for package in sorted(listed - existing):
        yield f"pyproject.toml: {package} is listed, but there is no such folder"


def _pin_violations(root: Path) -> Iterator[str]:
    """constraints.txt holds names and versions only, and one for each direct dependency."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds: dict[str, set[str | None]] = {}
    for number, line in enumerate((root / "constraints.txt").read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match = PIN.match(line)
        if match is None:
            yield f"constraints.txt:{number}: {line!r} is not of the form name==version"
            continue
        bounds.setdefault(_normal_name(match.group(1)), set()).add(match.group(3))
    wanted = [*project["dependencies"]]
    for group in ("test", "dev"):
        wanted += project["optional-dependencies"][group]
    for requirement in wanted:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if bounds.get(_normal_name(name)) not in ({None}, {"<", ">="}):
            yield f"constraints.txt: {name} needs one version for every interpreter"


def _normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    violations = find_violations(root)
    for violation in violations:
        print(violation)
    if not violations:
        print("house rules: all kept")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
