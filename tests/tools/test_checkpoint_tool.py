"""scripts/checkpoint.py: list, verify, average, strip."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from safetensors import safe_open

from tests.program import Result, Vitamp, change_meta, change_settings, made_meta, metrics, save_image, train_tiny
from tests.saved import save_checkpoint
from tools.common import weights as tool_of_weights
from vitamp.checkpoints import MODEL, checkpoints_at
from vitamp.metrics import AVERAGE
from vitamp.weights import read_header

EMA = AVERAGE.file

TOOL = "scripts/checkpoint.py"
NAMES = [f"step-{update:09d}" for update in (22, 44, 66, 88)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with four checkpoints, in the middle and at the end of each."""
    words = ("SAVE_EVERY_UPDATES=22", "KEEP_LAST=0", "TRAIN.MODEL_EMA=true", "SAVE_FREQ=1")
    return train_tiny(tmp_path_factory.mktemp("checkpoint_tool"), *words)


@pytest.fixture
def tool(vitamp: Vitamp) -> Callable[..., Result]:
    return lambda *words, code=0: vitamp(*words, script=TOOL, code=code)


def weights(run: Path, name: str, file: str = MODEL) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / name / file)


def header(path: Path) -> dict[str, str]:
    with safe_open(str(path), framework="pt") as file:
        return file.metadata()


def test_list_shows_metrics_marks_and_damage(tool: Callable[..., Result], run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "checkpoints" / NAMES[2] / "state.pt").write_bytes(b"short")
    done = tool("list", copy)
    head, *rows, total = done.out.splitlines()
    assert head.split()[:3] == ["checkpoint", "epoch", "update"]
    assert [row.split()[0] for row in rows] == NAMES
    assert "in 1" in rows[0], "saved within the epoch"
    assert "damaged, state.pt does not have the size that was written" in rows[2]
    figures = {line["update"]: line for line in metrics(run, "val")}
    assert f"{figures[88]['loss']:.4f}" in rows[3]
    assert f"{figures[88]['ema_acc1']:.2f}" in rows[3]
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert "last" in rows[NAMES.index(index["last"])]
    assert "best" in rows[NAMES.index(index["best"])]
    assert total.startswith("4 checkpoints, ")


def test_verify_reports_damage_and_checks_the_rest(tool: Callable[..., Result], run: Path, tmp_path: Path) -> None:
    done = tool("verify", run)
    assert done.out.count(": good, ") == 4
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    bad = copy / "checkpoints" / NAMES[1] / EMA
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    done = tool("verify", copy, code=1)
    assert f"{NAMES[1]}: damaged, the contents of {EMA}" in done.err
    assert done.out.count(": good, ") == 3, "the others are verified too"
    one = tool("verify", copy / "checkpoints" / NAMES[0], copy / "checkpoints" / NAMES[1] / MODEL, code=1)
    assert one.out.count(": good, ") == 1


def test_verify_goes_on_where_a_run_removes_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_of_weights, "checkpoints_at", lambda path: [path / "gone", *checkpoints_at(path)])
    assert tool_of_weights.verify_checkpoints([run]) == 0


@pytest.mark.parametrize(
    ("words", "names", "file"),
    [
        ("{run} -last 3", NAMES[1:], EMA),
        ("{run} -last 3 -weights model", NAMES[1:], MODEL),
        ("{run} {first} -weights=model", ["{best}", NAMES[0]], MODEL),
        *((f"{{first}}/{file} {{second}}/{file}", NAMES[:2], file) for file in (EMA, MODEL)),
    ],
)
def test_average_of_the_last_the_best_and_named_checkpoints(
    tool: Callable[..., Result], run: Path, tmp_path: Path, words: str, names: list[str], file: str
) -> None:
    out, (first, second) = tmp_path / "mean.safetensors", (run / "checkpoints" / name for name in NAMES[:2])
    tool("average", *words.format(run=run, first=first, second=second).split(), f"--out={out}")
    best = json.loads((run / "checkpoints" / "index.json").read_text())["best"]
    names = [name.format(best=best) for name in names]
    sources = [weights(run, name, file) for name in names]
    found = safetensors.torch.load_file(out)
    assert found.keys() == sources[0].keys()
    for key, tensor in found.items():
        exact = torch.stack([source[key].double() for source in sources]).mean(0)
        assert tensor.dtype == sources[0][key].dtype
        assert torch.allclose(tensor.double(), exact, rtol=1e-7, atol=0), key
    assert json.loads(header(out)["from"]) == names
    assert "metrics" not in header(out), "an average has not been validated"


def test_integer_buffers_are_copied_and_not_averaged(tool: Callable[..., Result], tmp_path: Path) -> None:
    for update, seen in ((1, 10), (2, 21)):
        tensors = {"bn.num_batches_tracked": torch.tensor(seen), "bn.running_mean": torch.full((3,), float(seen))}
        save_checkpoint(tmp_path, update, {MODEL: tensors}, {"fp32_modules": []}, made_meta(update))
    tool("average", tmp_path, "-last", 2, "-out", tmp_path / "mean.safetensors")
    found = safetensors.torch.load_file(tmp_path / "mean.safetensors")
    assert int(found["bn.num_batches_tracked"]) == 21
    assert found["bn.running_mean"].tolist() == [15.5] * 3


def test_stripped_weights_load_into_a_run_and_into_timm(
    tool: Callable[..., Result], vitamp: Vitamp, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.safetensors"
    newest = run / "checkpoints" / NAMES[3]
    tool("strip", newest, "-out", out)
    assert out.stat().st_size < (newest / EMA).stat().st_size + 16_000, "weights and a header"
    assert out.stat().st_mode == (newest / "state.pt").stat().st_mode, "others may read it"
    told = header(out)
    meta = json.loads((newest / "meta.json").read_text())
    assert json.loads(told["classes"]) == [str(digit) for digit in range(10)]
    assert json.loads(told["input"]) == meta["input"]
    assert json.loads(told["metrics"]) == meta["metrics"]
    assert told["format"] == "pt"

    vitamp("-cfg", run / "config.yaml", "-eval", "-pretrained", out, "-output", tmp_path / "eval", code=0)
    (figures,) = metrics(tmp_path / "eval", "val")
    assert figures["acc1"] == pytest.approx(max(meta["metrics"]["acc1"], meta["metrics"]["ema_acc1"]))

    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_base_patch16_224", num_classes=10, checkpoint_path=str(out), **sizes)
    better = EMA if meta["metrics"]["ema_acc1"] > meta["metrics"]["acc1"] else MODEL
    for key, tensor in weights(run, NAMES[3], better).items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_files_are_written_below_home_and_have_no_paths(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    copy, images = tmp_path / "run", tmp_path / "images"
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        change_meta(folder, choices={"teacher_model": f"{tmp_path}", "teacher": f"resnet18 of {tmp_path}"})
    save_image(images / "x.png", seed=0)
    places = ("MODEL.PRETRAINED", "DATA.DATA_PATH", "DATA.CACHE", "DATA.EXCLUDE", "DATA.RELABEL", "SAVE", "TAG")
    more = ("TRAIN.KNN", "TRAIN.TEACHER_MODEL", "TRAIN.CLASS_WEIGHTS")
    paths: dict[str, Any] = dict.fromkeys((*places, *more), f"{tmp_path / 'x'}") | {"DATA.DATASET": f"hf:{tmp_path}"}
    paths["USE"] = [f"{tmp_path}/net.py", "Net.width=8", f"Net.root={tmp_path}", f"Net.both=[x, '{tmp_path}']"]
    public = {"DATA.DATASET": "hf:ylecun/mnist", "TRAIN.CLASS_WEIGHTS": "balanced"}
    for given, kept in ((paths, {"DATA.DATASET": "hf:", "USE": ["net.py", "Net.width=8"]}), (public, public)):
        change_settings(copy, given)
        for name, script, *words in (
            ("strip", TOOL, "strip", copy),
            ("average", TOOL, "average", copy, copy / "checkpoints" / NAMES[0]),
            ("export", "scripts/export.py", copy, "-to", "safetensors", "-images", images),
            ("again", "scripts/export.py", tmp_path / "strip.safetensors", "-to", "safetensors", "-images", images),
        ):
            out = tmp_path / f"{name}.safetensors"
            out.unlink(missing_ok=True)
            done = vitamp(*words, f"-out=~/{out.name}", script=script, env={"HOME": str(tmp_path)}, code=0)
            assert (f".safetensors -data_path {tmp_path}/x`" in done.out) == (name == "average")
            assert str(tmp_path) not in str(header(out)), name
            assert {key: read_header(out)["settings"].get(key) for key in given} == {**dict.fromkeys(given), **kept}


def test_bad_commands_are_refused(tool: Callable[..., Result], run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_checkpoint(other, 1, {MODEL: {"head.weight": torch.ones(3)}}, {}, made_meta(1))
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoints" / NAMES[0], damaged / NAMES[0])
    (damaged / NAMES[0] / MODEL).unlink()
    copied = shutil.copytree(run / "checkpoints" / NAMES[0], tmp_path / "copied")
    change_meta(copied, classes=[*map(str, range(9)), "x"])
    fold = shutil.copytree(run / "checkpoints" / NAMES[0], tmp_path / "fold")
    change_meta(fold, settings={"DATA.FOLD": "1/5"}, samples={"number": 9, "updates": 1, "order": "", "data": "other"})
    out = ("-out", tmp_path / "new.safetensors")
    for place in (copied, run := Path(shutil.copytree(run, tmp_path / "run"))):
        tool("strip", run, "-out", place / "plain.safetensors")
    first = run / "checkpoints" / NAMES[0]
    for words, said in (
        ((), "one of list, verify, average, strip"),
        (("mend", run), "unknown command 'mend'. The first word must be one of list, verify, average, strip"),
        (("list", tmp_path / "nothing"), ": no such file or folder"),
        (("list", tmp_path), "no checkpoint found"),
        (("strip", run), "-out"),
        (("strip", run, "-out", tmp_path / "x.pth"), "name a file that ends in .safetensors, such as x.safetensors"),
        (("strip", damaged / NAMES[0], *out), f"{MODEL} is missing"),
        (("strip", other, "-weights", "ema", *out), "has no EMA"),
        (("average", run, *out), "give one run with -last K"),
        (("average", run, "-last", 9, *out), "is 4. KEEP_LAST"),
        (("average", run, "-last", 0, *out), "from 1"),
        (("average", run, other, *out), "different architectures"),
        (("average", run, fold, *out), "cannot be averaged: DATA.FOLD is 1/5 and None."),
        (("average", run, copied, *out), "different models or splits and cannot be averaged: class 9 is x and 9."),
        (("average", run, copied / "plain.safetensors", *out), "plain.safetensors: this file holds only weights"),
        (("average", run, first / EMA, *out), "a file of other weights than"),
        (("verify", run / "plain.safetensors"), "plain.safetensors: this file holds only weights"),
    ):
        done = tool(*words, code=2)
        assert said in done.err, (words, done.text)
    assert not (tmp_path / "new.safetensors").exists()
