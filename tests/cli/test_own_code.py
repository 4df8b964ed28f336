"""Code of the user's own (-use): the examples of docs/own_code.md, errors in it, and whose code is executed."""

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import cohen_kappa_score
from torch.nn import functional as F

from datasets import open_dataset
from datasets.transforms.own import OwnChange
from engine.task.one import OneLabel
from engine.task.own_code import try_own_code
from engine.trained.model import load_trained
from engine.trained.own_code import bind, use_own_code
from models.build import build_model
from tests.documents import blocks, commands
from tests.engine.distill.test_distillation import teacher_in
from tests.engine.small import build
from tests.predicted import validation_predictions
from tests.program import Result, Vitamp, metrics
from tools.common.comparison import judged_by
from tools.common.run_metrics import metrics_of
from utils.config import TrainConfig, config_of_run, load_config
from utils.errors import UserError
from utils.own_code import execute, executed_own_files
from utils.record.run_folder import read_about
from vitamp import registry

OWN = ("focal.gamma=1.5", "Small.width=8", "square.size=5", "stripes.count=16", "VALIDATE_METRICS=kappa")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of the page, each in a file of its own."""
    folder = tmp_path_factory.mktemp("own")
    for block in blocks():
        if block.page == "docs/own_code.md" and (found := re.search(r"@\w+\n(?:def|class) (\w+)", block.text)):
            (folder / f"{found[1]}.py").write_text(block.text + "\n", encoding="utf-8")
    return folder


def _train(vitamp: Vitamp, files: Path, output: Path, *more: object, **how: Any) -> Result:
    use = ",".join(str(files / f"{name}.py") for name in ("focal", "Small", "square", "stripes", "kappa"))
    chosen = ("-dataset", "stripes", "-model", "Small", "TRAIN.LOSS=focal", "TRAIN.AUGMENT=square", *OWN)
    sizes = ("-batch_size", 8, "-image_size", 24, "-num_classes", 2, "-num_workers", 1, "-epochs", 1, "-device", "cpu")
    return vitamp("-use", use, *chosen, *sizes, "TRAIN.WARMUP_EPOCHS=0", "-output", output, *more, **how)


@pytest.mark.slow
def test_the_examples_of_the_page_train_resume_and_predict(vitamp: Vitamp, files: Path, tmp_path: Path) -> None:
    assert sorted(path.stem for path in files.iterdir()) == ["Small", "focal", "kappa", "square", "stripes"]
    run = tmp_path / "run"
    done = _train(vitamp, files, run, code=0)
    assert "loss focal, of your own" in done.text
    assert "16 training and 16 validation images of 24 x 24 x 3" in done.text  # count=16
    assert "Small), 242 parameters" in done.text  # width=8
    noted = {one["file"]: one for one in read_about(run)["own_code"]}
    assert noted["Small.py"]["registers"] == {"Small": "model"}
    (meta,) = run.glob("checkpoints/*/meta.json")
    assert json.loads(meta.read_text())["own_code"] == [*noted.values()]
    assert len([*(run / "own_code").iterdir()]) == 5

    refused = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=2", code=2)
    assert "not executed without your consent" in refused.err
    assert all(one["sha256"] in refused.err for one in noted.values())
    resumed = vitamp("-resume", run, "-trust", "TRAIN.NUM_EPOCHS=2", code=0)
    assert "Epoch[002/002]" in resumed.out
    assert len([*(run / "own_code").iterdir()]) == 5

    refused = vitamp(run, "-part", "val", script="scripts/predict.py", code=2)
    assert "Small.py (model Small)" in refused.err
    assert "focal.py" not in refused.err  # not needed
    own = ",".join(str(files / f"{name}.py") for name in ("Small", "stripes"))
    for consent in (("-trust",), ("-use", own)):
        predicted = vitamp(run, "-part", "val", *consent, script="scripts/predict.py", code=0)
        assert "horizontal" in predicted.out
    refused = vitamp(run, "-trust", "-to", "hub", "-output", tmp_path / "hub", script="scripts/export.py", code=2)
    assert "-to hub: timm does not have Small, a model of your own; use -to torch or onnx" in refused.err
    vitamp(run, "-trust", "-to", "torch", "-out", tmp_path / "m.pt2", script="scripts/export.py", code=0)
    torch.export.load(tmp_path / "m.pt2", extra_files=(about := {"vitamp.json": ""}))
    assert '"timm_name": null, "timm_arguments": null,' in str(about["vitamp.json"])

    alone = tmp_path / "alone.safetensors"
    vitamp("strip", run, "-out", alone, script="scripts/checkpoint.py", code=0)
    given = ("-dataset", "stripes", "-part", "val", "-num_workers", 0)
    refused = vitamp(alone, "-trust", *given, script="scripts/evaluate.py", code=2)
    assert "There is no copy of Small.py" in refused.err
    vitamp(alone, "-use", own, *given, script="scripts/evaluate.py", code=0)

    copy = next((run / "own_code").glob("Small-*.py"))
    copy.write_text(copy.read_text() + "\nprint('changed')\n")
    refused = vitamp(run, "-part", "val", "-trust", script="scripts/predict.py", code=2)
    assert "the copy was changed" in refused.err


@pytest.mark.slow
def test_own_code_computes_the_same_in_two_processes(vitamp: Vitamp, files: Path, tmp_path: Path) -> None:
    _train(vitamp, files, tmp_path / "one", "-accum_iter", 2, code=0)
    _train(vitamp, files, tmp_path / "two", "-ngpus", 2, script="main_multi_gpu.py", code=0)
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for event, name in (("train", "loss"), ("val", "kappa")):
        values = [[line[name] for line in lines if line["event"] == event] for lines in (first, second)]
        assert values[0]
        assert values[0] == values[1]


LOSS = "from vitamp import loss\n@loss\n"
SCALED = f"{LOSS}def bad(logits, targets, gamma: float = 2): ...\n"
METRIC = "from vitamp import metric\n\n\n@metric\n"
LEARNED = f"from torch import nn\n{LOSS}class bad(nn.PReLU):\n forward = lambda self, x, y: (self.weight * x).mean()\n"
MODEL = "from torch import nn\nfrom vitamp import model\n@model\ndef bad(num_classes):\n "
NO_ROWS = f"{LOSS}def bad(logits, targets): return logits[range(4), targets].mean()\n"
BAD = [
    ("TRAIN.LOSS=bad TRAIN.MIXUP_ALPHA=1", f"{LOSS}def bad(logits, targets): return targets.sum(1)\n", "as a scalar"),
    ("TRAIN.LOSS=bad", "def focal(:\n", "line 1: "),
    ("TRAIN.LOSS=bad", "import sys\nsys.exit(0)\n", "mine.py, line 2: SystemExit: 0"),
    ("TRAIN.LOSS=bad", "raise KeyboardInterrupt\n", "mine.py, line 1: KeyboardInterrupt"),
    ("TRAIN.LOSS=bad", "x = 1\n", "registers nothing"),
    ("TRAIN.LOSS=ce", f"{LOSS}def ce(logits, targets): ...\n", "the loss ce is vitamp's own already"),
    ("TRAIN.AUGMENT=Trivial", "from vitamp import *\n@augmentation\ndef Trivial(image): ...\n", "is vitamp's own"),
    ("TRAIN.LOSS=bad", f"{LOSS}def bad(logits): ...\n", "line 2: loss 'bad' must take"),
    ("TRAIN.LOSS=bad", f"{LOSS}def bad(logits, targets): return logits\n", "as a scalar"),
    ("TRAIN.LOSS=bad", f"{LOSS}def bad(logits, targets):\n    return logits[99]\n", "line 4: IndexError"),
    ("TRAIN.LOSS=bad TRAIN.DISTILLATION_TYPE=hard TRAIN.TEACHER_MODEL={}", NO_ROWS, "line 3: IndexError"),
    ("TRAIN.LOSS=bad", LEARNED, "freeze them: requires_grad_(False)"),
    ("TRAIN.LOSS=bad", f"{LOSS}def bade(logits, targets): ...\n", "Did you mean bade?"),
    ("TRAIN.LOSS=bad bad.gamma=high", SCALED, "bad.gamma=high: input should be a valid number"),
    ("TRAIN.LOSS=bad bad.gama=1", SCALED, "Did you mean bad.gamma?"),
    ("TRAIN.LOSS=bad", f"from torch import nn\n{LOSS}class bad(nn.MarginRankingLoss): ...\n", "loss bad: TypeError: "),
    ("-model bad", f"{MODEL}return nn.Flatten(0)\n", "model bad returned (256,) for 4 images"),
    ("-model bad", f"{MODEL}return nn.Linear(3, num_classes)\n", "model bad: RuntimeError: "),
    ("-model bad", f"{MODEL}m = nn.Identity()\n m.forward = lambda x: x.no\n return m\n", "line 6: AttributeError"),
    (
        "-model bad",
        "from timm.models import register_model\n@register_model\ndef vit_tiny_patch16_224(): ...\n",
        "Overwri",
    ),
    ("VALIDATE_METRICS=bad", f"{METRIC}def bad(probabilities, labels): return labels[9999]\n", "line 5: IndexError"),
    ("VALIDATE_METRICS=bad", f"{METRIC}def bad(probabilities, labels): return labels\n", "bad returned a tensor of"),
    ("VALIDATE_METRICS=bad", f"{METRIC}def macro_f1(probabilities, labels): ...\n", "macro_f1 is vitamp's own"),
    ("VALIDATE_METRICS=bad", f"{METRIC}def ema_f(probabilities, labels): ...\n", "the metric ema_f is vitamp's own"),
]


def test_a_metric_that_is_nan_is_null_in_every_file(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    own, run = tmp_path / "own.py", tmp_path / "run"
    own.write_text(f"{METRIC}def never(probabilities, labels): return float('nan')\n")
    words = ("-use", own, "VALIDATE_METRICS=never", "TRAIN.MAX_UPDATES=2", "-output", run)
    vitamp("-cfg", tiny, *words, code=0)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for file in [*run.rglob("*.json"), *run.rglob("*.jsonl")]:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)


NEAR = f"""{METRIC}class near:
    def __init__(self, digits: int = 2):
        self.digits, self.right, self.images = digits, 0, 0

    def update(self, probabilities, labels):
        self.right += int(((probabilities.argmax(1) - labels).abs() < self.digits).sum())
        self.images += len(labels)

    def compute(self):
        return self.right / self.images
"""


def test_metrics_of_ones_own_decide_and_are_shown(vitamp: Vitamp, tiny: Path, files: Path, tmp_path: Path) -> None:
    """One is a function, the other a class with a setting. Log, report, evaluation and a resumed run have them."""
    file, run = tmp_path / "kappa.py", tmp_path / "run"
    file.write_text((files / "kappa.py").read_text() + NEAR, encoding="utf-8")
    use = ("-use", file)
    own = ("VALIDATE_METRICS=kappa,near", "SAVE_BEST_BY=kappa", "near.digits=3", "kappa.weights=linear")
    words = ("-cfg", tiny, *use, *own, "TRAIN.MODEL_EMA=true", "-output", run)
    vitamp(*words, "TRAIN.NUM_EPOCHS=1", code=0)
    (line,) = metrics(run, "val")
    found = validation_predictions(load_trained(run, "ema"))
    guesses = found.logits.argmax(1)
    assert line["ema_kappa"] == pytest.approx(cohen_kappa_score(found.labels, guesses, weights="linear"), abs=1e-9)
    assert line["ema_near"] == pytest.approx(float(((guesses - found.labels).abs() < 3).double().mean()))
    assert line["kappa"] != line["ema_kappa"]
    log = (run / "log.txt").read_text()
    assert f", kappa: {line['kappa']:.4f}, near: {line['near']:.4f}\n" in log
    (meta,) = run.glob("checkpoints/*/meta.json")
    best = json.loads(meta.read_text())["best"]
    assert best["kind"].endswith("kappa")
    assert f"kappa {best['figure']:.4f} (epoch 1)" in log
    resumed = vitamp("-resume", run, *use, "TRAIN.NUM_EPOCHS=2", code=0)
    assert "is ignored" not in resumed.text
    assert metrics(run, "val")[-1]["kappa"] > line["kappa"]
    vitamp(run, script="scripts/report.py", code=0)
    page = (run / "report.html").read_text()
    assert "kappa of the best checkpoint" in page
    assert ">near<" in page
    judged = judged_by("near", "model", [config_of_run(run)])
    assert judged.last_value(metrics_of(run)) == metrics(run, "val")[-1]["near"]
    words = ("-resume", run, "-use", "kappa.py", "TRAIN.NUM_EPOCHS=3", "TRAIN.MAX_UPDATES=89")
    assert "kappa has changed" not in vitamp(*words, cwd=tmp_path, code=0).text
    for updates in (90, 91):  # with another setting, and with another file
        words = ("kappa.weights=quadratic", "TRAIN.NUM_EPOCHS=3", f"TRAIN.MAX_UPDATES={updates}")
        assert "The metric kappa has changed: the best so far, " in vitamp("-resume", run, *use, *words, code=0).text
        file.write_text(f"{file.read_text()}# changed\n")


def test_an_error_of_a_metric_in_training_loses_nothing(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "late.py", tmp_path / "run"
    file.write_text(f"{METRIC}def late(probabilities, labels):\n    return 1 / (360 - len(labels))\n", encoding="utf-8")
    words = ("-use", file, "VALIDATE_METRICS=late", "SAVE_BEST_BY=late", "TRAIN.NUM_EPOCHS=2")
    done = vitamp("-cfg", tiny, *words, "-output", run, code=1)
    assert f"{file}, line 6: ZeroDivisionError" in done.err
    assert "-resume repeats this validation" in done.err
    file.write_text(file.read_text().replace("360", "361"))
    vitamp("-resume", run, "-use", file, code=0)
    assert [line["late"] for line in metrics(run, "val")] == [1, 1]


ENDS = {
    "sys.exit(0)": "line 7: SystemExit: 0",
    "raise KeyboardInterrupt": "line 7: KeyboardInterrupt",
    "os._exit(0)": "line 7: RuntimeError: os._exit(0) before the run has ended",
}


@pytest.mark.parametrize("what", ENDS)
def test_own_code_cannot_end_a_training_as_done(vitamp: Vitamp, tiny: Path, tmp_path: Path, what: str) -> None:
    file = tmp_path / "mine.py"
    head = "import os, sys\nfrom torch.nn import functional as F\nfrom vitamp import loss\n@loss\n"
    body = f"    if len(logits) > 4:\n        {what}\n    return F.cross_entropy(logits, targets)\n"
    file.write_text(f"{head}def mine(logits, targets):\n{body}")
    done = vitamp("-cfg", tiny, "-use", file, "TRAIN.LOSS=mine", "-output", tmp_path / "run", code=1)
    assert f"{file}, {ENDS[what]}" in done.err


LEAVING = f"""import os, sys, time
from torch.nn import functional as F
{LOSS}def leaving(logits, targets):
    if os.fork() == 0:
        os._exit(0)  # a process of its own
    os.wait()
    if len(logits) > 4 and os.environ.get("RANK", "none") in os.environ["LEAVING"]:
        WAY
    if len(logits) > 4 and "SLOW" in os.environ:
        time.sleep(20)  # the launcher ends this rank here, before it can see that it has lost another
    return F.cross_entropy(logits, targets)
"""


LEFT = "RuntimeError: os._exit(0) before the run has ended"


@pytest.mark.parametrize(
    ("ranks", "way", "error", "env"),
    [
        *((ranks, "os._exit(0)", LEFT, {}) for ranks in ("0", "1", "0, 1")),
        *(("1", "sys.exit('no more')", "SystemExit: no more", env) for env in ({}, {"SLOW": "1"})),
    ],
)
def test_ranks_that_leave_are_named(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, ranks: str, way: str, error: str, env: dict[str, str]
) -> None:
    (file := tmp_path / "mine.py").write_text(LEAVING.replace("WAY", way))
    words = ("-cfg", tiny, "-use", file, "TRAIN.LOSS=leaving", "-output", tmp_path / "run", "-ngpus", 2)
    done = vitamp(*words, script="main_multi_gpu.py", env={"LEAVING": ranks, **env}, code=1)
    failed = f"{file}, line 10: {error}"
    named = re.findall(rf"error: rank (\d) on \S+ \(process \d+\) failed:\n{re.escape(failed)}", done.err)
    assert named
    assert set(named) <= set(ranks), "of both, the launcher may end the second before it has reported"
    assert re.search(r"error: rank \d .* failed:", (tmp_path / "run" / "log.txt").read_text())


@pytest.mark.parametrize(("chosen", "text", "words"), BAD, ids=[words for *_, words in BAD])
def test_an_error_names_file_and_line(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path, chosen: str, text: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    done = vitamp("-cfg", tiny, "-use", file, *chosen.format(digits_run).split(), "-output", tmp_path / "run", code=2)
    assert words in done.err, done.err
    assert not (tmp_path / "run").exists()


OF_TIMM = """from timm.models import VisionTransformer, register_model
@register_model
def vit_of_an_author(pretrained=False, **kwargs):
    return VisionTransformer(patch_size=4, embed_dim=24, depth=2, num_heads=2, **kwargs)
"""


def test_timms_register_model_counts(vitamp: Vitamp, tmp_path: Path) -> None:
    """It has its own sizes, and those of the data: classes, channels and image size."""
    file, run = tmp_path / "author.py", tmp_path / "run"
    file.write_text(OF_TIMM)
    data = ("-dataset", "digits", "-image_size", 12, "-num_classes", 10, "DATA.IMAGE_CHANNELS=1", "-device", "cpu")
    done = vitamp("-use", file, "-model", "vit_of_an_author", *data, "TRAIN.MAX_UPDATES=1", "-output", run, code=0)
    assert "Own code: author.py (model vit_of_an_author)" in done.text
    assert "vit_of_an_author (VisionTransformer, patch 4, width 24, depth 2, heads 2), 15,418 parameters" in done.text
    again = ("-eval", "-pretrained", run, "-output", tmp_path / "eval")
    vitamp(*again, "-use", file, "-model", "vit_of_an_author", *data, code=0)


NET = """import torch
from vitamp import model
@model
class Net(torch.nn.Linear):
    def __init__(self, num_classes, drop_path_rate=0.1, act=torch.relu, wide=True, width=64, img_size=9):
        super().__init__(width, num_classes, bias=wide)
        self.last = torch.linspace(0, drop_path_rate, 3)[-1].item()
        self.size, self.pretrained_cfg = img_size, {"num_classes": 1000}  # timm's models have it
    forward = lambda self, images: torch.nn.Linear.forward(self, images.flatten(1))
"""


@pytest.mark.usefixtures("nothing_registered")
def test_a_model_and_its_teacher_get_their_settings(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "net.py", tmp_path / "run"
    file.write_text(NET)
    image = {"DATA.IMAGE_SIZE": "8", "DATA.IMAGE_CHANNELS": "1", "USE": f"{file}", "MODEL.NAME": "Net"}
    own = {"Net.wide": "false", "Net.width": "64", "Net.drop_path_rate": "0.2"}
    for typed, last in (({}, 0.1), ({"MODEL.DROPPATH": "0.3"}, 0.3), (own, 0.2)):
        use_own_code(config := load_config(words={**image, **typed}).config, given=True)
        try_own_code(config)  # without weights, although `.item()` reads one
        built: Any = build_model(config.MODEL, 8, 1)
        assert (built.last, built.bias is None, built.size) == (pytest.approx(last), typed is own, 8)
    with pytest.raises(UserError, match=r"Net.drop_path_rate: a key of MODEL sets it too \(0.3\)"):
        build_model(config.MODEL.changed(DROPPATH=0.3), 8, 1)
    words = ("-dataset", "digits", "-num_classes", 10, *(f"{key}={value}" for key, value in image.items()))
    vitamp(*words, "Net.drop_path_rate=0.4", "TRAIN.MAX_UPDATES=1", "-device", "cpu", "-output", run, code=0)
    execute(file.rename(tmp_path / "moved.py"))  # the same code, as of another run
    taught = teacher_in(build(tiny, TRAIN__DISTILLATION_TYPE="hard", TRAIN__TEACHER_MODEL=run)).model.last
    mine = registry.registered["Net"].values["drop_path_rate"]
    assert (taught, mine, load_trained(run).model.last) == pytest.approx((0.4, 0.2, 0.4))
    words = ("-cfg", tiny, "-teacher_model", run, "TRAIN.DISTILLATION_TYPE=hard", "-dry_run")
    assert "net.py (model Net), sha256" in vitamp(*words, code=2).err
    vitamp(*words, "-trust", code=0)
    file.write_text(f"{NET}# changed\n")
    words = ("-dataset", "digits", "-num_classes", 10, *(f"{key}={value}" for key, value in image.items()), *words[2:])
    assert "net.py has changed since; the new file builds" in vitamp(*words, "-device", "cpu", code=0).text
    assert "Net has no features" in vitamp(run, "-knn", 3, "-trust", script="scripts/evaluate.py", code=2).err


def test_the_command_of_the_page_needs_no_recipe(vitamp: Vitamp, files: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text((files / "Small.py").read_text(), encoding="utf-8")
    (page,) = (block.text for block in blocks() if block.page == "docs/own_code.md" and "-model Small" in block.text)
    ((_, *words),) = commands(page)
    done = vitamp(*words, "-device", "cpu", "-dry_run", cwd=tmp_path, code=0)
    assert "Small (Small), 330 parameters" in done.text
    done = vitamp("amp", *words[:4], script="scripts/benchmark_amp.py", cwd=tmp_path, code=2)
    assert "benchmark_amp.py has no USE; its processes execute no code of your own" in done.err
    done = vitamp("-cfg", "vit_digits", "-use", "small.py", "-model", "Small", "-dry_run", cwd=tmp_path, code=2)
    assert "MODEL.PATCH_SIZE 2: Small has no such size; leave the key out, also of the file of -cfg" in done.err


def test_the_settings_of_a_run_execute_nothing(vitamp: Vitamp, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "evil.py"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(f"USE: [{file}]\nTRAIN: {{LOSS: evil}}\n", encoding="utf-8")
    file.write_text("from pathlib import Path\nPath(__file__).with_suffix('.done').touch()\n", encoding="utf-8")
    based = tmp_path / "based.yaml"
    based.write_text("BASE: [run/config.yaml]\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())  # and nothing else of a run
    resumed = (("-resume", run), ("-resume", run, "-trust"), ("-resume", "auto", "-output", tmp_path))
    for words in (("-cfg", run / "config.yaml"), ("-cfg", based), *resumed):
        done = vitamp(*words, "-dataset", "digits", "-device", "cpu", "-dry_run", code=2)
        assert "there is no loss of this name" in done.err
    assert not file.with_suffix(".done").exists()
    vitamp("-use", file, "-dry_run", code=2)
    assert file.with_suffix(".done").exists()


@pytest.fixture
def nothing_registered() -> Iterator[None]:
    """For tests that execute files in this process."""
    yield
    registry.registered.clear()
    executed_own_files.clear()


@pytest.mark.usefixtures("nothing_registered")
def test_a_loss_and_a_data_set_get_their_settings(files: Path) -> None:
    execute(files / "focal.py")
    logits, labels = torch.randn(8, 3), torch.arange(8) % 3
    train = TrainConfig.model_validate({"LOSS": "focal"})
    bind(["focal.gamma=0"], ["focal"], all_files=True)
    expected = F.cross_entropy(logits, labels)
    assert torch.allclose(OneLabel(3).loss(train, None)(logits, labels), expected)
    bind([], ["focal"], all_files=True)  # the default
    assert OneLabel(3).loss(train, None)(logits, labels) < expected
    execute(files / "stripes.py")
    data = load_config(words={"DATA.DATASET": "stripes"}).config.DATA
    for count in (16, 64):  # of two runs in one process
        bind([f"stripes.count={count}"], ["stripes"], all_files=True)
        assert len(open_dataset(data, False, 2, 0, torch.device("cpu"))) == count


@pytest.mark.usefixtures("nothing_registered")
def test_a_loss_computes_in_fp32_with_amp(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "gram.py").write_text(f"{LOSS}def gram(logits, targets): return (logits @ logits.T).mean()\n")
    execute(tmp_path / "gram.py")
    loss, logits = build(tiny, USE=tmp_path / "gram.py", TRAIN__LOSS="gram").parts.criterion, torch.randn(8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(logits, logits).dtype is torch.float32, "a product of bf16 would be bf16"
    words = {"USE": "gram.py", "TRAIN.LOSS": "gram", "MODEL.MAE_PRETRAIN": "true", "TRAIN.MIXUP_ALPHA": "0.8"}
    try_own_code(load_config(words=words).config)  # without labels, which computes no loss of one's own


@pytest.mark.usefixtures("nothing_registered")
def test_an_augmentation_can_be_sent_to_a_process_that_is_spawned(files: Path) -> None:
    execute(files / "square.py")
    bind(["square.probability=1", "square.size=8"], ["square"], all_files=True)
    sent = pickle.dumps(OwnChange("square"))
    registry.registered.clear()
    executed_own_files.clear()
    changed = pickle.loads(sent)(Image.new("L", (9, 9), 255))  # noqa: S301
    assert np.count_nonzero(np.asarray(changed) == 0) == 64


def test_an_error_in_a_loading_process_names_the_line(vitamp: Vitamp, files: Path, tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "import torch.utils.data\nfrom vitamp import augmentation\n\n\n@augmentation\ndef late(image):\n"
        "    if torch.utils.data.get_worker_info():\n        raise KeyError('lost')\n    return image\n\n\n"
        + (files / "stripes.py").read_text().replace("images,", "images[..., ::-1],")  # with negative strides
    )
    settings = ("-dataset", "stripes", "-use", file, "TRAIN.AUGMENT=late")
    sizes = ("-model", "vit_tiny_patch16_224", "-image_size", 32, "-num_workers", 1, "-batch_size", 8, "-epochs", 1)
    done = vitamp(*settings, *sizes, "-device", "cpu", "-output", tmp_path / "run", code=1)
    assert f"{file}, line 8: KeyError: 'lost'" in done.err


def test_files_at_home_may_have_one_name_and_capital_settings(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        text = f"{LOSS}def {name}(logits, targets, T: float = 1): return T * logits.square().mean()\n"
        (tmp_path / name / "loss.py").write_text(text)
    tiny.write_text(tiny.read_text() + "USE: [~/one/loss.py, ~/two/loss.py]\n")
    words = ("-cfg", tiny, "TRAIN.LOSS=one", "one.T=2", "-output", tmp_path / "run", "-resume", "auto")
    vitamp(*words, "TRAIN.MAX_UPDATES=2", env={"HOME": str(tmp_path)}, code=0)
    done = vitamp(*words, "-dry_run", env={"HOME": str(tmp_path)}, code=0)
    assert "has changed since the run's last start" not in done.text


def test_a_changed_file_is_named(vitamp: Vitamp, tiny: Path, files: Path, digits_run: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "focal.py", tmp_path / "run"
    file.write_text((files / "focal.py").read_text())
    use, square = f"{file},{files / 'square.py'}", "TRAIN.AUGMENT=square"
    vitamp("-cfg", tiny, "-use", use, "TRAIN.LOSS=focal", square, "-epochs", 1, "-output", run, code=0)
    vitamp("-eval", "-resume", run, "-output", tmp_path / "eval", code=0)  # which needs neither file
    file.write_text(file.read_text() + "\n# changed\n")
    done = vitamp("-resume", run, "-use", use, "-epochs", 2, code=0)
    assert f"{file} has changed since the run's last start" in done.text
    assert len([*(run / "own_code").iterdir()]) == 3
    assert "not used" not in done.text
    own = f"{file},{files / 'Small.py'},{files / 'square.py'},{files / 'stripes.py'},{files / 'kappa.py'}"
    shown = vitamp("-cfg", tiny, "-use", own, "focal.gamma=3", "VALIDATE_METRICS=kappa", "-print_config")
    assert "focal.gamma=3" in shown.out
    lines = [line for line in shown.out.splitlines() if "not used" in line]
    assert lines == [
        "loss focal of focal.py is registered, but not used; TRAIN.LOSS=focal chooses it",
        "model Small of Small.py is registered, but not used; MODEL.NAME=Small chooses it",
        "augmentation square of square.py is registered, but not used; TRAIN.AUGMENT=square chooses it",
        "dataset stripes of stripes.py is registered, but not used; DATA.DATASET=stripes chooses it",
    ]
    vitamp(run, script="scripts/evaluate.py", code=0)  # a loss is not needed
    file.write_text((files / "stripes.py").read_text().replace('"horizontal", "vertical"', '"0", "1"'))
    done = vitamp(digits_run, "-use", file, "-dataset", "stripes", script="scripts/evaluate.py", code=0)
    assert "stripes, validation split: 64 images" in done.out
