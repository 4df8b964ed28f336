"""A checkpoint with missing or invalid fields is skipped for the one before it, with a warning that names the field."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.find import chosen_checkpoint
from tests.program import Vitamp, metrics, run_program, train_tiny, write_meta
from utils.config import load_config
from utils.distributed.world import ALONE
from vitamp.checkpoints import META, STATE

FIRST, NEWEST = "step-000000044", "step-000000088"
GONE = "(left out)"
# (keys that lead to the field, its new value, text of the warning)
IN_META: list[tuple[str, Any, str]] = [
    ("format", GONE, "format is missing"),
    ("format", "1", "format: Input should be a valid integer"),
    ("files", {}, "'files' does not name model.safetensors and state.pt"),
    ("files state.pt size", "7", "files.state.pt.size: "),
    ("files ../config.yaml", {"size": 0, "sha256": ""}, "'../config.yaml', which is not the name of a file"),
    *((key, GONE, f"{key} is missing") for key in ("epoch", "epoch_finished", "batch", "samples", "settings")),
    ("epoch", 0, "epoch: "),
    ("epoch", True, "epoch: "),
    ("update", GONE, "update is missing"),
    ("update", -1, "update: "),
    ("update", 88.5, "update: "),
    ("metrics acc1", "high", "metrics.acc1: "),
    ("batch", {}, "batch.per_process is missing; batch.accumulated is missing; batch.processes is missing"),
    ("batch per_process", 0, "batch.per_process: "),
    ("choices", None, "choices: "),
    ("choices compile", "most", "choices.compile: "),
    ("choices batch_size", "auto", "choices.batch_size: "),
    ("samples updates", 0, "samples.updates: "),
    ("samples order", 5, "samples.order: "),
    ("classes", [0, 1], "classes.0: "),
    ("settings", [], "settings: "),
    ("frozen", {"head": 1}, "frozen: "),
]
FLAGS = ("-amp", "fp16", "TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=2", "SAVE_FREQ=1", "KEEP_LAST=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with both checkpoints."""
    return train_tiny(tmp_path_factory.mktemp("trained"), *FLAGS)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def replace(content: dict[str, Any], place: str, value: Any) -> None:
    *way, last = place.split()
    for key in way:
        content = content[key]
    if value == GONE:
        del content[last]
    else:
        content[last] = value


def damage_meta(run: Path, *damages: tuple[str, Any], name: str = NEWEST) -> None:
    path = run / "checkpoints" / name / META
    meta = json.loads(path.read_text())
    for place, value in damages:
        replace(meta, place, value)
    write_meta(path, meta)


def damage_state(run: Path, *damages: tuple[str, Any], name: str = NEWEST) -> None:
    """Damage the state, and update its hash."""
    path = run / "checkpoints" / name / STATE
    state = torch.load(path, weights_only=True)
    for place, value in damages:
        replace(state, place, value)
    torch.save(state, path)
    seal = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    damage_meta(run, ("files state.pt", seal), name=name)


def chosen(run: Path) -> str | None:
    config = load_config(str(run / "config.yaml"), {"MODEL.RESUME": ("auto", ""), "OUTPUT": (str(run), "")}).config
    found = chosen_checkpoint(config, ALONE)
    return found.folder.name if found else None


@pytest.mark.parametrize(("place", "value", "said"), IN_META, ids=lambda value: str(value)[:40])
def test_invalid_field_falls_back_to_the_checkpoint_before(
    run: Path, place: str, value: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage_meta(run, (place, value))
    assert chosen(run) == FIRST
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{NEWEST}/{META}: damaged, " in warning
    assert said in warning
    assert warning.endswith("Trying the checkpoint before it.")


def test_edited_update_is_found_and_moves_nothing(vitamp: Vitamp, run: Path) -> None:
    path = run / "checkpoints" / NEWEST / META
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "update": 50}))
    said = "damaged or edited, its contents are not what was written"
    checked = vitamp("verify", run, script="scripts/checkpoint.py", code=1)
    assert (said in checked.err, checked.out.count(": good")) == (True, 1), checked.text
    assert said in vitamp("-resume", path.parent, code=2).err
    assert path.exists()
    path.write_text(json.dumps(meta))
    assert vitamp("verify", run, script="scripts/checkpoint.py", code=0).out.count(": good") == 2
    assert chosen(run) == NEWEST


def test_unknown_fields_are_ignored(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage_meta(run, ("later", [1]), ("choices later", 3), ("batch later", None))
    assert chosen(run) == NEWEST
    assert not caplog.records


@pytest.mark.parametrize(
    ("place", "value"), [("batch", {}), ("choices", None), ("update", GONE)], ids=lambda value: str(value)[:20]
)
@pytest.mark.parametrize("wanted", ["auto", "the run"])
def test_run_resumes_from_the_checkpoint_before(vitamp: Vitamp, run: Path, place: str, value: Any, wanted: str) -> None:
    damage_meta(run, (place, value))
    done = vitamp("-resume", "auto" if wanted == "auto" else run, "-output", run, code=0)
    assert f"{NEWEST}/{META}: damaged, {place}" in done.err
    assert f"{FIRST}: epoch 2, 44 updates done" in done.out
    assert [line["epoch"] for line in metrics(run, "epoch")] == [1, 2]


@pytest.mark.parametrize("tool", ["evaluate.py", "checkpoint.py verify", "checkpoint.py list", "predict.py"])
@pytest.mark.parametrize(("file", "place"), [(META, "choices"), (META, "classes"), (STATE, "fp32_modules")])
def test_tools_name_the_invalid_field(run: Path, tmp_path: Path, tool: str, file: str, place: str) -> None:
    (damage_meta if file == META else damage_state)(run, (place, 5))
    script, *words = tool.split()
    images = [tmp_path] * (script == "predict.py")
    done = run_program(*words, run / "checkpoints" / NEWEST, *images, script=f"scripts/{script}", streams=tmp_path)
    if (script, file) != ("checkpoint.py", STATE):  # which does not read the state
        assert f"{place}: Input should be" in done.text, done.text
