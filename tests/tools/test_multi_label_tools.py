"""The tools and a run with several labels per image: they know it, or refuse it in a sentence."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from engine.report.curves import draw_curves
from tests.label_sets import CLASSES, named, truth, write_images, write_recipe, write_set
from tests.program import ROOT, Result, metrics, run_program
from vitamp.metrics import MAP
from vitamp.weights import read_header

Tool = Callable[..., Result]
LONGER = ("TRAIN.NUM_EPOCHS=4", "DATA.BATCH_SIZE=8", "TRAIN.MODEL_EMA=true", "SAVE_FREQ=1", "REPORT_FREQ=40")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labelled")
    write_set(root)
    run_program("-cfg", write_recipe(root), "-output", root / "run", *LONGER, streams=root, code=0)
    return root / "run"


@pytest.fixture
def tool(vitamp: Tool) -> Tool:
    """Call a tool by its name, which must end with the exit code `code`."""
    return lambda name, *words, code=0: vitamp(*words, script=f"scripts/{name}.py", code=code)


def best(run: Path) -> dict[str, Any]:
    index = json.loads((run / "checkpoints/index.json").read_text())
    return json.loads((run / "checkpoints" / index["best"] / "meta.json").read_text())


def test_evaluate_has_the_metrics_of_the_run(tool: Tool, run: Path, tmp_path: Path) -> None:
    meta = best(run)
    which = "ema" if meta["best"]["kind"].startswith("ema_") else "model"
    text = tool("evaluate", run, "-json", tmp_path / "e.json").out
    ours = json.loads((tmp_path / "e.json").read_text())["figures"][which]
    theirs, prefix = meta["metrics"], "ema_" * (which == "ema")
    for name in ("map", "auroc", "f1_micro", "f1_macro", "exact_match", "loss"):
        assert ours[name] == pytest.approx(theirs[prefix + name], abs=1e-4), name
    # Thresholds from the same images, so the tuned F1 of the validation.
    assert ours["f1_macro_at_thresholds"] == pytest.approx(theirs[f"{prefix}f1_macro_tuned"], abs=1e-9)
    assert ours["per_class"]["threshold"] == meta["thresholds"][which]
    assert ours["acc1"] is None
    for name in ("map", "auroc", "exact_match", "exact_match_at_thresholds"):
        low, high = ours["intervals"][name]
        assert low < ours[name] < high
        assert f"{ours[name]:.2f} % ({low:.2f} to {high:.2f})" in text
    assert np.mean(ours["per_class"]["average_precision"]) == pytest.approx(ours["map"])
    rows = truth(61, seed=1)
    assert ours["per_class"]["images"] == rows.sum(0).tolist()
    unlabelled = int((rows.sum(1) == 0).sum())
    assert f"61 images with {rows.sum()} labels of 4 classes; {unlabelled} images without a label" in text
    assert "a class is predicted if its probability reaches its own threshold, found in the model's validation" in text
    words = "1 of 4 classes keep a threshold of 0.5, with fewer than 20 validation images: north"
    assert words in text
    assert words in (run / "log.txt").read_text()
    assert ours["per_class"]["threshold"][CLASSES.index("north")] == 0.5


def test_evaluate_matches_classes_of_other_data_by_name(tool: Tool, run: Path, tmp_path: Path) -> None:
    """Its own 0/1 columns, in another order, without one of the classes, with one of groups."""
    rows = truth(40, seed=5)
    paths = write_images(tmp_path, rows, "other", seed=5)
    order = [CLASSES.index(name) for name in ("west", "east", "north")]
    lines = [f"{path},p1,{','.join(map(str, row[order]))}" for path, row in zip(paths, rows, strict=True)]
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,patient,west,east,north", *lines, ""]))
    done = tool("evaluate", run, "-json", tmp_path / "e.json", "-data_path", tmp_path, "DATA.GROUP=patient")
    assert f"csv in {tmp_path}, validation split has no class south: predictions of it count as mistakes" in done.err
    (figures,) = json.loads((tmp_path / "e.json").read_text())["figures"].values()
    counts = rows.sum(0) * (np.array(CLASSES) != "south")
    assert figures["per_class"]["images"] == counts.tolist()
    assert figures["per_class"]["average_precision"][CLASSES.index("south")] is None


def test_images_without_any_label_have_no_table(tool: Tool, run: Path, tmp_path: Path) -> None:
    for name in ("none.csv", "test.csv"):
        (run.parent / name).write_text(f"path,{','.join(CLASSES)}\nimages/val0.png,0,0,0,0\n")
    done = tool("evaluate", run, "-data_path", run.parent / "none.csv")
    assert "1 images with 0 labels of 0 classes; 1 images without a label" in done.out
    tool("report", run, "-part", "test", "-out", tmp_path / "r.html", code=2)
    (run.parent / "test.csv").unlink()
    assert "could not be evaluated: no test image has a label" in (tmp_path / "r.html").read_text()


def predicted(tool: Tool, run: Path, *words: object) -> list[dict[str, Any]]:
    done = tool("predict", run, run.parent / "images", "-format", "jsonl", *words)
    return [json.loads(line) for line in done.out.splitlines()]


def test_predict_names_the_labels_that_reach_their_thresholds(tool: Tool, run: Path) -> None:
    meta = best(run)
    which = "ema" if meta["best"]["kind"].startswith("ema_") else "model"
    limits = dict(zip(CLASSES, meta["thresholds"][which], strict=True))
    all_of = {row["image"]: row["guesses"] for row in predicted(tool, run, "-threshold", 0)}
    assert all(len(guesses) == 4 for guesses in all_of.values())
    rows = predicted(tool, run)
    counts = set()
    for row in rows:
        expected = [one for one in all_of[row["image"]] if one["probability"] >= round(limits[one["class"]], 6)]
        assert row["guesses"] == expected
        counts.add(len(expected))
    assert len(counts) > 1
    in_order = [sorted(all_of[row["image"]], key=lambda guess: guess["label"]) for row in rows]
    scores = np.array([[guess["probability"] for guess in guesses] for guesses in in_order])
    labels = {
        path: [int(name in text.split(";")) for name in CLASSES]
        for file in ("train.csv", "val.csv")
        for path, text in list(csv.reader((run.parent / file).open()))[1:]
    }
    validation = [n for n, row in enumerate(rows) if "/val" in row["image"]]
    known = np.array([labels[f"images/{Path(row['image']).name}"] for row in rows])
    found = 100 * float(average_precision_score(known[validation], scores[validation], average="macro"))
    assert found == pytest.approx(meta["best"]["figure"], abs=0.5), "probabilities are rounded to six digits"
    assert all(len(row["guesses"]) <= 1 for row in predicted(tool, run, "-topk", 1))


def test_predict_explains_each_predicted_label(tool: Tool, run: Path, tmp_path: Path) -> None:
    words = (run, "-part", "val", "-threshold", 0.4, "-format", "jsonl", "-explain", tmp_path / "maps")
    rows = [json.loads(line) for line in tool("predict", *words).out.splitlines()]
    expected = set()
    for number, row in enumerate(rows, start=1):
        expected |= {f"{number:02}_{Path(row['image']).stem}_{guess['class']}.jpg" for guess in row["guesses"]}
    assert {file.name for file in (tmp_path / "maps").iterdir()} == expected
    assert len(expected) > len(rows)


def test_features_have_all_labels_of_an_image(tool: Tool, run: Path, tmp_path: Path) -> None:
    known = truth(61, seed=1)
    tool("predict", run, "-part", "val", "-features", tmp_path / "val.npz")
    arrays = np.load(tmp_path / "val.npz")
    assert tuple(arrays["classes"]) == CLASSES
    assert (arrays["labels"] == known).all()


@pytest.mark.slow
def test_stripped_weights_keep_their_thresholds_and_averaged_ones_lose_them(
    tool: Tool, run: Path, tmp_path: Path
) -> None:
    image = run.parent / "images/val1.png"
    expected = tool("predict", run, image, "-weights", "model").out
    alone, mean = tmp_path / "alone.safetensors", tmp_path / "mean.safetensors"
    tool("checkpoint", "strip", run, "-weights", "model", "-out", alone)
    done = tool("predict", alone, image)
    assert done.out == expected, done.err
    assert "its own threshold, found" in done.err
    tool("checkpoint", "average", run, "-last", 2, "-out", mean)
    done = tool("predict", mean, image)
    assert "a class is predicted if its probability reaches 0.5, because these weights have no thresholds" in done.err
    table = tool("checkpoint", "list", run).out
    assert "mAP    EMA mAP" in table
    assert f"{best(run)['metrics']['map']:.2f}" in table


def test_report_has_average_precision_of_each_class(tool: Tool, run: Path, tmp_path: Path) -> None:
    tool("report", run, "-out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "to tell 4 classes apart, several per image.</p>" in page
    assert "Its mean average precision (mAP) is <b>" in page
    assert "Ordering the images at random gives 39.75\N{NO-BREAK SPACE}%" in page, "the mean prevalence of the classes"
    assert "Weakest class: north (average precision " in page
    assert "Classes, lowest average precision first" in page
    assert "1 of 4 classes keep a threshold of 0.5, with fewer than 20 validation images: north" in page
    assert "Confusion matrix" not in page
    assert "Mean average precision (%)" in page
    assert "top-1" not in page.partition("Details of the run")[0].partition("<body")[2]
    top = max(line[key] for line in metrics(run, "val") for key in ("map", "ema_map"))
    assert f"{top:.2f} % (epoch" in page
    _check_examples(page, run.parent)
    assert (curves := draw_curves(run, "labelled", MAP)) is not None
    assert curves.stat().st_size > 10_000


def _check_examples(page: str, root: Path) -> None:
    """The labels of the example images are the true ones, and images with wrong ones come first."""
    figures = re.findall(r'<figure title="(\S+)">(.*?)</figure>', page, re.DOTALL)
    assert len(figures) == 12
    rows = (row.split(",") for row in (root / "val.csv").read_text().splitlines()[1:])
    true = {path: set(names.split(";")) - {""} for path, names in rows}
    wrong = []
    for path, figure in figures:
        kinds = {label: kind for kind, label in re.findall(r'class="label (\w+)">(\w+) ', figure)}
        assert {label for label, kind in kinds.items() if kind != "extra"} == true[path[path.index("images/") :]]
        wrong.append(sum(kind != "right" for kind in kinds.values()))
    assert wrong == sorted(wrong, reverse=True)
    assert wrong[0] > 0 == wrong[-1]


def test_check_data_counts_labels(tool: Tool, run: Path, tmp_path: Path) -> None:
    done = tool("check_data", "-cfg", run.parent / "recipe.yaml", "-json", tmp_path / "c.json")
    rows = truth(160)
    unlabelled = int((rows.sum(1) == 0).sum())
    words = f"160 images in 4 classes, with {rows.sum()} labels; {unlabelled} images without a label"
    assert f"Training split: {words}" in done.out
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["classes"]["training"] == dict(zip(CLASSES, rows.sum(0).tolist(), strict=True))
    assert found["images_without_label"]["training"] == unlabelled


@pytest.mark.slow
def test_check_data_compares_all_labels_of_copies(vitamp: Tool, tmp_path: Path) -> None:
    rows = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=np.uint8)
    paths = write_images(tmp_path, rows, "one")
    (tmp_path / paths[1]).write_bytes((tmp_path / paths[0]).read_bytes())
    lines = [f"{path},{';'.join(named(row))}" for path, row in zip(paths, rows, strict=True)]
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,labels", *lines]) + "\n")
    done = vitamp("-cfg", write_recipe(tmp_path), script="scripts/check_data.py", code=1)
    assert f"but {CLASSES[0]} instead of {CLASSES[0]};{CLASSES[1]}" in done.out


@pytest.mark.slow
def test_export_notes_the_sigmoid(tool: Tool, run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    done = tool("export", run, "-to", "onnx,torch,safetensors", "-weights", "model", "-out", tmp_path / "m")
    assert done.out.count("no answer changed; apply a sigmoid to the logits") == 3
    header = read_header(tmp_path / "m.safetensors")
    assert (header["multi_label"], header["activation"]) == (True, "sigmoid")
    assert header["class_thresholds"] == best(run)["thresholds"]["model"]
    words = ("-to", "onnx", "-with_resize", "-weights", "model", "-check", 8, "-out", tmp_path / "whole.onnx")
    done = tool("export", run, *words)
    assert done.out.count("no answer changed\n") == 1, "they are probabilities"
    done = tool("export", run, "-to", "onnx", "-int8", "-weights", "model", "-out", tmp_path / "m8.onnx")
    number = int(done.out.partition(" answers changed: ")[0].rpartition(" ")[2])
    page = (tmp_path / "m8.onnx.changed.html").read_text(encoding="utf-8")
    assert page.count("<figure") == number
    assert "<b>0</b><span>of them right in the file" in page
    image = run.parent / "images/val1.png"
    alone = tool("predict", tmp_path / "m.safetensors", image)
    assert alone.out == tool("predict", run, image, "-weights", "model").out

    page = (ROOT / "docs/export.md").read_text(encoding="utf-8")  # what it says of several labels
    (prepare,) = re.findall(r"```python\n# prepare\.py\n(.*?)```", page, re.DOTALL)
    (choose,) = re.findall(r"^chosen = .*", page, re.MULTILINE)
    space: dict[str, Any] = {"about": header}
    exec(prepare, space)
    images = space["prepare"](image, header)[None]
    (space["logits"],) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(["logits"], {"images": images})
    exec(choose, space)
    (said,) = json.loads(tool("predict", tmp_path / "m.safetensors", image, "-format", "json").out)
    assert space["chosen"][0].tolist() == [name in {one["class"] for one in said["guesses"]} for name in CLASSES]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pack_images.py {data} packed {labels}", "{key}: packed tar files hold one label per image"),
        ("benchmark_amp.py amp {labels} -data_path {data}", "{key}: benchmark_amp.py measures models with one label"),
        ("export.py {run} -to hub -output hub", "-to hub: this model has several labels per image"),
        ("evaluate.py {run} -knn", "-knn: needs one label per image"),
    ],
)
def test_what_needs_one_label_per_image_refuses_it(
    vitamp: Tool, run: Path, tmp_path: Path, line: str, said: str
) -> None:
    labels = "-dataset csv DATA.MULTI_LABEL=true"
    script, *words = line.format(data=run.parent, run=run, labels=labels).split()
    done = vitamp(*words, script=f"scripts/{script}", cwd=tmp_path, code=2)
    assert said.format(key="DATA.MULTI_LABEL true") in done.err
    assert list(tmp_path.iterdir()) == []
