"""The notebooks run from top to bottom on the small real model, and keep their outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert sum(len(cell.outputs) for cell in cells) >= len(cells) // 2
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]


@pytest.mark.real
@pytest.mark.usefixtures("real_smollm")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = _texts(notebook)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": path.parent}}).execute()
    # Ids and times differ from run to run; the drawn trees and answers do not.
    assert len(_texts(notebook)) == len(kept)


def _texts(notebook: nbformat.NotebookNode) -> list[str]:
    return [
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    ]
