"""vitamp.train in a notebook: its progress, its metrics, predictions, and an error in the program's words."""

from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT, TINY_DIGITS, save_image

HOW = "pip install nbclient ipykernel"
nbclient: Any = pytest.importorskip("nbclient", reason=HOW)
nbformat: Any = pytest.importorskip("nbformat", reason=HOW)
pytest.importorskip("ipykernel", reason=HOW)

CELLS = (
    "import vitamp\nrun = vitamp.train('tiny.yaml', epochs=1, device='cpu', output='run')",
    "[row['epoch'] for row in run.metrics if row['event'] == 'val']",
    "[len(one.guesses) for one in run.predict(['0.jpg', '0.jpg'], topk=3)]",
    "vitamp.train('tiny.yaml', epochs=-1)",
)


def test_a_notebook_trains_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    save_image(tmp_path / "0.jpg", seed=0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    at = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True, resources=at).execute()

    trained, metrics, predicted, failed = (cell.outputs for cell in notebook.cells)
    shown = "".join(one["text"] for one in trained)
    assert "\repoch 1/1 " in shown, "the bar"
    assert "\x1b[1mepoch  train loss  val loss" in shown
    assert "Done: best top-1" in shown
    assert metrics[-1]["data"]["text/plain"] == "[1]"
    assert predicted[-1]["data"]["text/plain"] == "[3, 3]"
    error = "-epochs: TRAIN.NUM_EPOCHS: expected whole number >= 0 or auto, got -1."
    assert (failed[-1]["ename"], failed[-1]["evalue"]) == ("ValueError", error)
