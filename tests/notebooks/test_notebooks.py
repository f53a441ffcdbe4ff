"""The notebooks run from top to bottom, and are kept with their pictures."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".cache" / "test-programs"
MAX_BYTES = 500_000
FIRST_TOKENS = ROOT / "notebooks" / "01_first_tokens.ipynb"
NUM_PICTURES = 6


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def num_pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.fixture
def notebook(demo_dir: Path) -> nbformat.NotebookNode:
    """Without outputs, on the demo checkpoint and compiled programs of the tests."""
    notebook = nbformat.read(FIRST_TOKENS, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    lines = ("from pathlib import Path", f"MODEL = Path({str(demo_dir)!r})", f"PROGRAMS = Path({str(PROGRAMS)!r})")
    parameters.source = "\n".join(lines)
    return notebook


def test_it_runs(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    """A cell that fails raises here. The engine serves from a kernel whose event loop is running."""
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert num_pictures(notebook) == NUM_PICTURES
    printed = "".join(output.text for output in outputs(notebook) if output.output_type == "stream")
    assert "rows that the last token reads: {2: 128, 4: 128, 6: 128} of [192, 384, 384]" in printed
    assert "each step was launched before the tokens of the one before it were read: True" in printed


def test_it_is_kept_with_its_pictures() -> None:
    kept = nbformat.read(FIRST_TOKENS, 4)
    assert num_pictures(kept) == NUM_PICTURES
    assert not [output for output in outputs(kept) if output.output_type == "error"]
    assert FIRST_TOKENS.stat().st_size < MAX_BYTES
