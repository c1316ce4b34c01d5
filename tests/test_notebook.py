"""The notebook of the examples, run as a reader runs it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "notebook" / "audit_rows.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    """The code cells of the notebook with what each displayed."""
    pytest.importorskip("pandas", reason="pandas is in the extra dev")
    pytest.importorskip("ipykernel", reason="ipykernel is in the extra dev")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that run notebooks
        client = pytest.importorskip("nbclient", reason="nbclient is in the extra dev")
        import nbformat

        book = nbformat.read(NOTEBOOK, as_version=4)
        assert all(not cell.get("outputs") for cell in book.cells), "outputs are not kept: they would become stale"
        where = {"metadata": {"path": str(NOTEBOOK.parent)}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            client.NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    return [cell for cell in book.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """The last thing that a cell displayed, as a page."""
    assert [output for output in cell.outputs if output.output_type == "stream"] == []
    return str(cell.outputs[-1].data["text/html"])


def test_every_cell_of_the_notebook_shows_what_its_text_says(cells: list[Any]) -> None:
    rows, scan, findings, repaired, again = map(shown, cells)
    assert "reward" in rows
    assert "errors in 2 of 5 rollouts" in scan
    assert "&lt;rows&gt;" in scan
    assert all(code in scan and code in findings for code in ("TOK101", "SEQ301"))
    assert "fork" in repaired
    assert "0 errors" in again or "no errors" in again
