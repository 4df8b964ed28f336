"""What only complete runs show: the accuracy that README promises, and memory that does not grow with the epochs."""

import json
import re
import statistics
from pathlib import Path

import pytest

from tests.program import ROOT, Vitamp, metrics

STANDARD_ERRORS = 3
"""Another CPU rounds differently, which acts like another seed."""
EPOCHS, SETTLED = 200, 50
MOST_GROWTH_MB = 2


def promised() -> tuple[float, float]:
    """Best top-1 of the quickstart's recipe with -amp by README; the standard error of its mean over three seeds."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"quickstart's recipe reaches a best top-1 of ([\d.]+) %, with and without `-amp` \(", text)
    assert found is not None, "README promises nothing"
    runs = json.loads((ROOT / "docs" / "results" / "digits.json").read_text(encoding="utf-8"))["runs"]
    best = [run["best_acc1"] for run in runs if run["precision"] == "bf16"]
    return float(found[1]), statistics.stdev(best) / len(best) ** 0.5


@pytest.mark.slow
def test_quickstarts_recipe_reaches_the_accuracy_in_the_readme(vitamp: Vitamp, tmp_path: Path) -> None:
    best = []
    for seed in range(3):
        run = tmp_path / str(seed)
        words = ("-cfg", ROOT / "configs" / "vit_digits.yaml", "-amp", "-device", "cpu", f"SEED={seed}")
        vitamp(*words, "-output", run, timeout=500, code=0)
        best.append(max(line["acc1"] for line in metrics(run, "val")))
    mean, error = promised()
    assert statistics.mean(best) > mean - STANDARD_ERRORS * error, best
    assert min(best) > 97, "98 to 99 % is what the quickstart announces"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_epochs(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """With everything that is repeated in each epoch: validation of two sets of weights, curves and checkpoints."""
    run = tmp_path / "run"
    each = ("SAVE_FREQ=1", "VALIDATE_FREQ=1", "KEEP_LAST=1", "REPORT_FREQ=45", "TRAIN.MODEL_EMA=true")
    words = ("-cfg", tiny, "-output", run, f"TRAIN.NUM_EPOCHS={EPOCHS}", *each, "-amp", "bf16")
    vitamp(*words, slow_start=True, timeout=1500, code=0)
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    peaks = {line["epoch"]: 1000 * line["perf"]["peak_memory_gb"] for line in lines if line["event"] == "train"}
    assert len(peaks) == EPOCHS
    assert peaks[EPOCHS] - peaks[SETTLED] < MOST_GROWTH_MB, {epoch: peaks[epoch] for epoch in range(10, EPOCHS + 1, 10)}
