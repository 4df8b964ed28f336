"""choose_precision.py: it measures the user's own training, and recommends by the results."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_DIGITS
from tests.program import Result, metrics
from tests.tools.test_compare import Trainings
from tools.choose_precision.command import main
from tools.compare import train

UPDATES = 12
SCALE = ("AMP.INIT_LOSS_SCALING=1e30", "AMP.USE_DYNAMIC_LOSS_SCALING=false")
REPORT = "choose_precision.json"


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A complete examination, which several tests read: bf16, and fp16 with a loss scale far too large."""
    root = tmp_path_factory.mktemp("examined")
    cfg = root / "tiny.yaml"
    cfg.write_text(TINY_DIGITS.replace("THREADS: 1", "THREADS: 1\nSEED: 5"), encoding="utf-8")
    code, out, _ = examine(root, cfg)
    assert code == 0, out
    return cfg, out, json.loads((root / "out" / REPORT).read_text(encoding="utf-8")), root / "out"


def examine(root: Path, cfg: Path) -> tuple[int, str, list[str]]:
    """Run the tool here, and its trainings in processes that have imported torch: exit code, output, runs started."""
    trainings = Trainings(root)
    words = ("-cfg", cfg, "-updates", UPDATES, "-output", root / "out", "-modes", "fp16,bf16", *SCALE)
    with pytest.MonkeyPatch.context() as there, contextlib.redirect_stdout(io.StringIO()) as out:
        there.setattr(train, "start", trainings.start)
        code = main([*map(str, words)])
    return code, out.getvalue(), trainings.started


def test_measurements_are_runs(examined: Any, vitamp: Callable[..., Result], tmp_path: Path) -> None:
    """The baseline is exactly what main_single_gpu.py trains; other seeds train differently."""
    cfg, _, found, folder = examined
    run = tmp_path / "run"
    done = vitamp("-cfg", cfg, "-output", run, "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={UPDATES}")
    assert done.code == 0, done.text
    theirs = [line["loss"] for line in metrics(run, "train")]
    first, second, third = (run["losses"] for run in found["fp32"]["runs"])
    assert first == theirs
    assert first[0] != second[0] != third[0]
    assert found["runs"] == ["fp32-5", "bf16-5", "fp32-6", "fp16-5", "fp32-7"]
    assert [line["loss"] for line in metrics(folder / "fp32-5", "train")] == theirs


def test_same_command_resumes_finished_runs(examined: Any) -> None:
    cfg, out, found, folder = examined
    (folder / REPORT).rename(folder / "before.json")
    code, again, started = examine(folder.parent, cfg)
    assert code == 0, again
    assert started == []
    repeated = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    assert (repeated["fp32"], repeated["recommendation"]) == (found["fp32"], found["recommendation"])
    assert again.splitlines()[-3:-1] == out.splitlines()[-3:-1]


def test_too_large_a_loss_scale_is_not_recommended(examined: Any) -> None:
    _, out, found, _ = examined
    fp16 = next(mode for mode in found["modes"] if mode["name"] == "fp16")
    assert fp16["skipped"] == UPDATES
    assert any(f"{UPDATES} of {UPDATES} updates were skipped" in reason for reason in fp16["against"])
    assert min(layer["headroom"] for layer in fp16["layers"]) < 1
    assert found["recommendation"]["mode"] != "fp16"
    assert "fp16: not recommended" in out


def test_report(examined: Any) -> None:
    _, out, found, folder = examined
    assert found["recommendation"]["sentence"].partition(":")[0] in (folder / "report.html").read_text(encoding="utf-8")
    assert {"command", "started", "device", "versions", "seconds", "recommendation"} <= set(found)
    assert found["device"].startswith("cpu")
    bf16 = next(mode for mode in found["modes"] if mode["name"] == "bf16")
    assert len(bf16["losses"]) == UPDATES
    assert bf16["images_per_second"] > 0
    assert bf16["peak_memory_gb"] > 0.1
    assert {layer["name"] for layer in bf16["layers"]} >= {"patch_embed.proj", "blocks.0.attn.qkv", "head"}
    assert 0 < bf16["difference"] < found["fp32"]["seed_noise"]
    assert out.rstrip().splitlines()[-2] == f"Flags: {found['recommendation']['flags']}"
    assert found["recommendation"]["sentence"] in out


@pytest.mark.slow
def test_budget_cuts_measurements_short(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("-cfg", tiny, "-updates", 5000, "-modes", "bf16", "-output", out, "TRAIN.NUM_EPOCHS=500")
    result = vitamp(*words, "-budget_min", 1.5, script="scripts/choose_precision.py", timeout=300)
    assert result.code == 0, result.text
    assert "cut short (-budget_min)" in result.out
    found = json.loads((out / REPORT).read_text(encoding="utf-8"))
    assert all(0 < run["updates"] < 5000 for run in found["fp32"]["runs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-modes", "bf16,O2_bf16"), "Did you mean O2-bf16?"),
        (("-modes", "tf32"), "Ampere"),
        (("-modes", "NAIVE-bf16", "AMP.FP32_MODULES=head"), "AMP.FP32_MODULES"),
        (("-updates", "2"), "-updates 2"),
        (("-eval",), "EVAL"),
    ],
)
def test_bad_input_is_refused_before_measuring(
    in_process: Callable[..., Callable[..., Result]], tiny: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = in_process(main)("-cfg", tiny, "-output", tmp_path / "out", "-device", "cpu", *words)
    assert result.code == 2, result.text
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_existing_report_is_not_overwritten(
    in_process: Callable[..., Callable[..., Result]], tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / REPORT).write_text("mine", encoding="utf-8")
    result = in_process(main)("-cfg", tiny, "-output", tmp_path)
    assert result.code == 2, result.text
    assert f"{REPORT} exists" in result.err
    assert (tmp_path / REPORT).read_text(encoding="utf-8") == "mine"
