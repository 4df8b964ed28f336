"""Terminal output: log lines, progress bar, and the flags that only print something."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT, Vitamp, metrics, save_image
from tests.terminal import on_terminal

TIMES = r"Time: \d+:\d\d:\d\d, Left: \d+:\d\d:\d\d"
HEALTH = r"Img/s: [\d.]+, Data: \d+%, Grad: \d+\.\d{4}, Mem: \d+\.\d\dGB, " + TIMES
PADDLEVIT = (
    r"Epoch\[001/001\], Step\[00(10|20|30|40|44)/0044\], Lr: \d\.\d{6}e-\d\d, "
    r"Loss: \d+\.\d{4} \(\d+\.\d{4}\), Avg Acc: \d+\.\d{4}, " + HEALTH
)
FLEET = r"\[Epoch 0, batch (0|20|40|43)\] loss: \d+\.\d{5}, acc1: \d+\.\d{5}, acc5: \d+\.\d{5}"
VALIDATION = (
    r"----- Epoch\[001/001\], Validation Loss: \d+\.\d{4}, Validation Acc@1: \d+\.\d{4}, "
    r"Validation Acc@5: \d+\.\d{4}, time: \d+\.\d\d, Balanced Acc: \d+\.\d{4}, Macro F1: \d+\.\d{4}"
)


def lines_like(pattern: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if re.fullmatch(pattern, line)]


def test_paddlevit_log_lines(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.NUM_EPOCHS=1")
    assert len(lines_like(PADDLEVIT, done.out)) == 5
    assert len(lines_like(VALIDATION, done.out)) == 1
    assert not [mark for mark in ("\r", "\x1b", "%|") if mark in done.text], "a pipe gets no progress bar"
    assert done.err == ""


def test_fleet_log_lines_count_from_0(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("LOG_STYLE=fleet", "REPORT_FREQ=20", "TRAIN.NUM_EPOCHS=1")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words)
    assert len(lines_like(FLEET, done.out)) == 4
    assert len(lines_like(r"Lr: \d\.\d{6}e-\d\d, " + HEALTH, done.out)) == 3, (
        "the first knows no pace, so it ends before Left"
    )
    summary = (
        r"----- Epoch 0, {0} Loss: \d+\.\d{{4}}, {0} {1}: \d+\.\d{{4}}, {0} Acc@5: \d+\.\d{{4}}, time: \d+\.\d\d{2}"
    )
    macro = r", Balanced Acc: \d+\.\d{4}, Macro F1: \d+\.\d{4}"
    for part, word, more in (("Train", "Acc", ""), ("Validation", "Acc@1", macro)):
        assert len(lines_like(summary.format(part, word, more), done.out)) == 1
    assert "Step[" not in done.out
    assert "Epoch[" not in done.out
    assert "epoch and batch lines count from 0" in done.out


def test_paddlevit_lines_on_a_terminal_have_a_progress_bar(tiny: Path, tmp_path: Path) -> None:
    """It has loss, images per second and the time left, and log lines do not break it."""
    words = ("TRAIN.NUM_EPOCHS=8", "REPORT_FREQ=4", "LOG_STYLE=paddlevit")
    shown = on_terminal("-cfg", tiny, "-output", tmp_path / "run", *words, columns=160)
    bars = [piece for piece in re.split(r"[\r\n]+", shown.raw) if " left, " in piece]
    form = r"epoch \d/8 \S* +\d+/44 \[\d\d:\d\d left, run \d:\d\d:\d\d left, loss \d+\.\d{4}, [\d,]+ images/s\]"
    assert any(re.search(form, bar) for bar in bars), bars[-3:]
    assert sum("Step[" in line for line in shown.lines) == 89
    assert "Done: best" in shown.raw


def test_table_of_epochs_goes_into_a_pipe_if_asked_for(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    no_terminal = {"COLUMNS": ""}  # which readline sets in processes that pytest starts
    done = vitamp("-cfg", tiny, "-output", run, "LOG_STYLE=table", "TRAIN.NUM_EPOCHS=2", env=no_terminal, code=0)
    assert "Step[" not in done.out
    assert len(lines_like(r"epoch  train loss  val loss .* images/s +lr", done.out)) == 1, "a file has any width"
    assert "..." not in done.out, "no sentence is cut"
    assert len(lines_like(r" *[12]/2 +\d+\.\d+ +\d+\.\d+ .*", done.out)) == 2
    assert "\x1b" not in done.text, "no colours"
    assert "\r" not in done.text, "no bar"
    assert (run / "log.txt").read_text().count("Step[") > 2


def test_a_pipe_gets_few_lines_before_the_first_epoch_and_after_the_last(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    """log.txt has the others; the pipe says how many they are."""
    words = ("-dataset", "imagefolder", "-data_path", tmp_path / "images", "-num_classes", "auto", "LOG_STYLE=auto")
    for split, name, number in ((s, n, k) for s in ("train", "val") for n in "abc" for k in range(4)):
        save_image(tmp_path / "images" / split / name / f"{number}.jpg", seed=number, size=(40 + number, 40))
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, "DATA.IMAGE_CHANNELS=3", "-batch_size", 4, code=0)
    before, epochs = done.out.split("Epoch[", 1)
    shown = before.splitlines()
    assert len(shown) <= 12
    assert shown[0].startswith("vitamp ")
    assert [line.split()[0] for line in shown[1:7]] == ["device", "precision", "model", "data", "inputs", "training"]
    logged = (tmp_path / "run/log.txt").read_text()
    assert "MODEL.NUM_CLASSES 3: classes of" in logged
    assert "MODEL.NUM_CLASSES" not in before
    lines_before = logged.split("Epoch[", 1)[0].count("\n")
    on_standard_output = lines_before - done.err.count("warning: ")
    assert shown[-1] == f"{on_standard_output - len(shown) + 1} more lines in log.txt"
    end = epochs.rpartition("Validation Loss")[2].splitlines()[1:]
    others = ("Checkpoint", "Where the time went", "Next", "  ")
    assert 2 <= len([line for line in end if not line.startswith(others)]) <= 5


def test_first_update_and_the_loss_of_a_part_of_an_epoch_are_logged(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.MAX_UPDATES=3", code=0)
    assert [line["update"] for line in metrics(tmp_path / "run", "train")] == [1]
    assert done.out.count("Step[0001/0044]") == done.out.count("Step[") == 1
    assert re.search(r"----- Epoch\[001/002\], Train Loss: [\d.]+, Train Acc: [\d.]+, Train Acc@5: ", done.out)


def test_lines_leave_out_what_can_have_only_one_value(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """The top 5 of three classes are all of them, and fp32 has no loss scale; metrics.jsonl keeps both."""
    for split, name, number in ((s, n, k) for s in ("train", "val") for n in "abc" for k in range(4)):
        save_image(tmp_path / "images" / split / name / f"{number}.jpg", seed=number)
    words = (
        "-dataset",
        "imagefolder",
        "-data_path",
        tmp_path / "images",
        "MODEL.NUM_CLASSES=3",
        "-batch_size",
        4,
        "DATA.IMAGE_CHANNELS=3",
    )
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, "TRAIN.NUM_EPOCHS=1", code=0)
    assert "Validation Acc@1: " in done.out
    assert not [word for word in ("Acc@5", "Scale: ", "Skipped: ") if word in done.out]
    assert metrics(tmp_path / "run", "val")[0]["acc5"] == 100
    line = metrics(tmp_path / "run", "train")[0]
    assert (line["scale"], line["skipped"]) == (1, 0)


def test_list_models_prints_timm_names(vitamp: Vitamp) -> None:
    done = vitamp("-list_models", "vit_tiny*", code=0)
    names = done.out.split()
    assert "vit_tiny_patch16_224" in names
    assert all(name.startswith("vit_tiny") for name in names)
    vitamp("-list_models", "no_such*", code=2)
    every = vitamp("-list_models", code=0).out.split()
    assert {"vit_base_patch16_224", "swin_base_patch4_window12_384_21k_1k"} <= set(every), "PaddleViT's names too"
    assert every == sorted(every)


def test_next_commands_have_the_folder_and_come_before_the_last_line(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    done = vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=2")
    *_, title, evaluate, predict, export, report, resume, last = done.out.splitlines()
    assert title == "Next (export -with_resize: a file that does the preprocessing, too):"
    assert "The run ends here, after update 2, as set by TRAIN.MAX_UPDATES." in done.out
    assert last.startswith("Done: ")
    for line, name, tool in (
        (evaluate, "evaluate", "evaluate.py"),
        (predict, "predict", "predict.py"),
        (export, "export", "export.py"),
        (report, "report", "report.py"),
        (resume, "resume", "main_single_gpu.py"),
    ):
        words = shlex.split(line)
        assert words[:2] == [name, "python"]
        assert Path(words[2]).name == tool
        assert Path(words[2]).exists()
        assert str(run) in words
    again = vitamp(*shlex.split(resume)[3:], code=0)
    assert "after update 4" in again.out
    finished = vitamp(*shlex.split(resume)[3:])
    assert "had already finished: 4 updates" in finished.out
    assert shlex.split(finished.out.splitlines()[-2])[-1] == "TRAIN.MAX_UPDATES=8"


def test_banner_has_mean_std_and_crop(vitamp: Vitamp, tiny: Path) -> None:
    digits, others = vitamp("-cfg", tiny, "-dry_run"), vitamp("-cfg", tiny, "-dry_run", "-dataset", "synthetic")
    assert re.search(r"inputs +mean 0\.5; std 0\.5\n", digits.out), digits.out  # which are not cropped
    assert re.search(r"inputs +mean 0\.5; std 0\.5; crop random, CROP_PCT 0\.875, bicubic\n", others.out), others.out


def test_dry_run_tries_what_may_be_faster(vitamp: Vitamp, tiny: Path) -> None:
    tiny.write_text(re.sub("NAME: tiny.*", "TYPE: timm, NAME: test_resnet, NUM_CLASSES: 10}", tiny.read_text()))
    words = ("-dataset", "synthetic", "DATA.IMAGE_SIZE=64", "SPEED=-channels_last")
    said = vitamp("-cfg", tiny, "-dry_run", *words, code=0).out
    assert re.search(r"tried +SPEED=\+channels_last: [\d.]+ times the speed \(.+, 5 of each by turns\)", said), said


@pytest.mark.slow
def test_training_survives_a_closed_pipe(tiny: Path, tmp_path: Path) -> None:
    """`| head -1` ends reading, not training; log.txt has all lines."""
    run = tmp_path / "run"
    command = shlex.join(map(str, (sys.executable, ROOT / "main_single_gpu.py", "-cfg", tiny, "-output", run)))
    piped = f"set -o pipefail; {command} REPORT_FREQ=1 | head -1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    log = (run / "log.txt").read_text()
    assert log.count("The program reading standard output has closed its pipe: the run continues") == 1
    assert log.count("Step[") == 88
    assert "Done: best" in log
