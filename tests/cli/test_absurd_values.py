"""Settings far out of range, files nested too deeply, and closed streams: one line says what is wrong."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import ROOT, Result

Vitamp = Callable[..., Result]

DEEP = "[" * 100_000
ABSURD = {
    "-amp fp16 AMP.INIT_LOSS_SCALING=1e308": "AMP.INIT_LOSS_SCALING: expected number > 0 and <= 3e+38, got 1e308",
    "THREADS=99999999999999": "THREADS: expected whole number >= 1 and <= 4096",
    "NGPUS=99999999999999": "NGPUS: expected whole number >= -1 and <= 1024",
    "DATA.NUM_WORKERS=99999999": "DATA.NUM_WORKERS: expected whole number >= 0 and <= 1024",
    "MODEL.DEPTH=99999999": "99,999,999 blocks; at most 10,000 are supported",
    "MODEL.EMBED_DIM=99999998": "The model has 119,999,999,999,999,962 weights, which take 447,034,836 GiB",
    "MODEL.NUM_CLASSES=99999999999": "The model has 1,700,000,003,663 weights",
    "DATA.IMAGE_SIZE=99999996": "The model has 9,999,999,200,003,802 weights",
    "DATA.BATCH_SIZE=99999999999999999999999": "not one full batch",
}


@pytest.mark.parametrize("words", ABSURD)
def test_absurd_setting_is_refused_at_once(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: str) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words.split())
    assert done.code == 2, done.text
    assert ABSURD[words] in " ".join(done.err.split())
    assert "Traceback" not in done.text


def test_blocks_of_swins_stages_are_counted(vitamp: Vitamp) -> None:
    swin = ("-dry_run", "MODEL.NAME=swin_tiny_patch4_window7_224", "DATA.DATASET=synthetic")
    done = vitamp(*swin, "MODEL.STAGE_DEPTHS=[2, 2, 99999999, 2]")
    assert done.code == 2, done.text
    assert "100,000,005 blocks; at most 10,000" in done.err


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "config.yaml", "index.json", "meta.json"])
def test_file_that_is_nested_too_deeply_is_no_traceback(
    vitamp: Vitamp, digits_run: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    files = list(run.rglob(name))
    assert files
    for file in files:
        file.write_text(DEEP, encoding="utf-8")
    for script, *words in (
        ("main_single_gpu.py", "-resume", "auto", "-output", run, "TRAIN.NUM_EPOCHS=3"),
        ("scripts/report.py", run),
        ("scripts/checkpoint.py", "list", run),
        ("scripts/evaluate.py", run),
    ):
        done = vitamp(*words, script=script)
        assert "Traceback" not in done.text, f"{script}: {done.text}"
        assert done.code in (0, 2), f"{script}: {done.text}"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    for words in ("main_single_gpu.py -version", "scripts/checkpoint.py -h"):
        command = f"{shlex.quote(sys.executable)} {words} {closed}"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
