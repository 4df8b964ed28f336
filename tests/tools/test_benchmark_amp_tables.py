"""Tables of benchmark_amp.py, each measured once at a small size, with real processes and updates."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.program import Result
from tools.benchmark_amp.amp import OFF, ON
from tools.benchmark_amp.command import main
from tools.benchmark_amp.results import AGAIN
from tools.benchmark_amp.training import AlternatingTraining, Job, TrainingSession, free_port
from tools.common.processes import OUT_OF_MEMORY, own_processes
from utils.config import Config, load_config
from utils.distributed.world import BY_HAND, World
from utils.seeding import seed_all

Fields = dict[str, Any]


@pytest.fixture
def measured(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Fields, str]]:
    """`measured("amp", "-iters", 2)` runs a table; returns the -json file and the printed report."""

    def call(table: str, *words: object) -> tuple[Fields, str]:
        files = ["-json", tmp_path / "t.json", "-plot", tmp_path / "t.png"]
        assert main([str(word) for word in (table, "-cfg", tiny, *words, *files)]) == 0
        with Image.open(tmp_path / "t.png") as picture:
            assert picture.format == "PNG"
        output = capsys.readouterr().out
        results = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
        assert not any("failed" in turn for turns in results["turns"].values() for turn in turns)
        assert results["versions"]["torch"] in output
        assert results["device"] in output
        return results, output

    return call


def test_amp(measured: Callable[..., tuple[Fields, str]]) -> None:
    first, _ = measured("amp", "-iters", 2, "-windows", 1)
    results, output = measured("amp", "-iters", 2, "-windows", 2)
    off, on, again = ([turn["seconds"] for turn in results["turns"][name]] for name in (OFF, ON, OFF + AGAIN))
    assert [len(off), len(on), len(again)] == [2, 2, 2]
    assert first["turns"][OFF] == results["turns"][OFF][:1], "the file is resumed"
    rows = {line.strip().partition("  ")[0]: line.split() for line in output.splitlines()}
    assert rows[ON][2:6] == [f"{value:.4g}" for value in (*on, sum(on) / 2, sum(off) / sum(on))]
    assert rows[OFF][2:5] == [f"{value:.4g}" for value in (*off, sum(off) / 2)]
    assert [results["turns"][name][0]["precision"] for name in (OFF, ON)] == ["fp32", "bf16"]
    assert all(turn["images_per_second"] * turn["seconds"] == pytest.approx(64) for turn in results["turns"][ON])


SMALL = ("-image_size", 32, "-batch_size", 4, "-num_classes", 4, "DATA.IMAGE_CHANNELS=3", "-num_workers", 0)


@pytest.mark.slow
def test_amp_measures_the_images_of_data_path(
    imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], vitamp: Callable[..., Result]
) -> None:
    """Its layout is recognised; a folder that does not exist is refused, and so is any by tables that read none."""
    vit = ("-model", "tiny", "MODEL.PATCH_SIZE=16", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")
    words = ("amp", *vit, *SMALL, "-device", "cpu", "-iters", 2, "-windows", 1)
    out = tmp_path / "amp.json"
    done = vitamp(*words, "-data_path", imagenet, "-json", out, script="scripts/benchmark_amp.py")
    assert done.code == 0, done.text
    (line,) = [line for line in done.out.splitlines() if line.strip().startswith("images: ")]
    assert re.search(rf"images: those of imagenet2012 in {imagenet}; waiting for data: \d+ %", line), line
    turns = [turn for turns in json.loads(out.read_text())["turns"].values() for turn in turns]
    assert all(turn["data_wait_percent"] > 0 for turn in turns), "files are read by the training process"
    done = vitamp(*words, script="scripts/benchmark_amp.py")
    assert "images: synthetic (made on the device); waiting for data: " in done.out
    for table, path, said in (
        ("amp", tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
        ("precisions", tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
        *((table, imagenet, f"-data_path {imagenet}: this table measures no files") for table in READ_NO_FILES),
    ):
        assert main([table, "-data_path", str(path), "-device", "cpu", *map(str, (*vit[:2], *SMALL))]) == 2
        assert said in capsys.readouterr().err


READ_NO_FILES = ("scaling", "simplenet", "timm")


def test_trainings_end_for_each_other_without_memory_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[AlternatingTraining] = []
    trainings = [AlternatingTraining(Job(Config(), 1), beside) for _ in range(2)]

    def memory_for_one(training: AlternatingTraining) -> dict[str, Any]:
        training._worker._pool = own_processes()
        return {"failed": OUT_OF_MEMORY} if sum(other.is_running for other in beside) > 1 else {"seconds": 1.0}

    monkeypatch.setattr(AlternatingTraining, "_try", memory_for_one)
    for training in (*trainings, *trainings):
        assert training.turn() == {"seconds": 1.0}
        assert [other.is_running for other in trainings] == [other is training for other in trainings]
    monkeypatch.setattr(AlternatingTraining, "_try", lambda _: {"failed": OUT_OF_MEMORY})
    assert trainings[0].turn() == {"failed": OUT_OF_MEMORY}, "memory for none"


def test_precisions(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("precisions", "-modes", "O2-bf16", "-iters", 1, "-rounds", 1)
    assert list(results["turns"]) == [
        "fp32, synthetic", "O2-bf16, synthetic", "fp32, synthetic, again", "fp32, files", "O2-bf16, files"
    ]  # fmt: skip
    assert {name: turns[0]["precision"] for name, turns in results["turns"].items()} == {
        name: "O2-bf16" if name.startswith("O2") else "fp32" for name in results["turns"]
    }
    assert all(0.1 < turns[0]["peak_memory_gb"] < 3 for turns in results["turns"].values())
    (row,) = [line.split() for line in output.splitlines() if line.strip().startswith("O2-bf16")][-1:]
    fast, base = (results["turns"][f"{mode}, synthetic"][0]["images_per_second"] for mode in ("O2-bf16", "fp32"))
    assert f"{fast / base:.2f}" in row


def test_precisions_with_apex_and_accumulation(measured: Callable[..., tuple[Fields, str]]) -> None:
    words = ("-modes", "apex", "-no_files", "-iters", 1, "-rounds", 1, "-accum_iter", 2)
    results, output = measured("precisions", *words)
    assert "apex, synthetic" in results["turns"]
    assert "an iteration is one update of 2 micro-batches of 32 images" in output


def test_precisions_without_files(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("precisions", "-modes", "bf16", "-iters", 1, "-rounds", 1, "-no_files")
    assert list(results["turns"]) == ["fp32, synthetic", "bf16, synthetic", "fp32, synthetic, again"]
    assert "from files" not in output


def test_simplenet_has_the_losses_of_a_loop_by_hand(measured: Callable[..., tuple[Fields, str]]) -> None:
    words = ("-width", 16, "-batches", 4, "-epochs", 2, "-accumulated", 2, "-batch_size", 8, "-rounds", 1, "SEED=3")
    results, output = measured("simplenet", *words)
    assert "AMP on, 2 batches an update" in output
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, 8, 16, generator=generator) for _ in range(4)]
    losses = {together: _loss_by_hand(batches, together) for together in (1, 2)}
    assert results["turns"][OFF][0]["loss"] == pytest.approx(losses[1], abs=1e-6)
    assert results["turns"][OFF][0]["loss"] == results["turns"][OFF + AGAIN][0]["loss"]
    assert results["turns"]["AMP on, 2 batches an update"][0]["loss"] == pytest.approx(losses[2], abs=0.01)


def _loss_by_hand(batches: list[torch.Tensor], together: int) -> float:
    seed_all(3, "init")
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    losses: list[float] = []
    for _ in range(2):
        for number, (data, target) in enumerate(batches, 1):
            loss = torch.nn.functional.mse_loss(net(data), target)
            (loss / together).backward()
            losses.append(loss.item())
            if number % together == 0:
                optimizer.step()
                optimizer.zero_grad()
    return sum(losses[-together:]) / together


def test_scaling(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("scaling", "-axes", "batch", "-batches", "32,64", "-iters", 1, "-rounds", 1)
    small, large = "tiny, 8 pixels, batch 32", "tiny, 8 pixels, batch 64"
    assert list(results["turns"]) == [small, large, small + AGAIN]
    work = results["settings"]["work"]
    assert work[small]["gflop_per_image"] == work[large]["gflop_per_image"] > 0
    seconds = results["turns"][small][0]["seconds"]
    (row,) = [line.split() for line in output.splitlines() if line.strip().startswith("64 ")]
    assert row[3] == "2", "twice the work"
    assert float(row[5].replace(",", "")) == pytest.approx(2000 * seconds, rel=0.01), "predicted: twice the time"


def test_scaling_with_processes(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("scaling", "-axes", "processes", "-processes", "2", "-iters", 1, "-rounds", 1)
    assert list(results["turns"]) == ["2 processes", "2 processes, no exchange", "2 processes" + AGAIN]
    both = results["turns"]["2 processes"][0]["images_per_second"]
    (row,) = [line.split() for line in output.splitlines() if line.strip().startswith("2 ")]
    assert float(row[1].replace(",", "")) == pytest.approx(2 * both, rel=0.01), "of both processes"


@pytest.mark.slow
def test_without_exchange_processes_diverge(tiny: Path) -> None:
    config = load_config(str(tiny)).config
    for exchange, alike in ((True, True), (False, False)):
        first, second = _in_two_processes(Job(config, 1, exchange))
        assert (first == second) == alike


def _in_two_processes(job: Job) -> list[float]:
    address = ("127.0.0.1", free_port())
    with own_processes(2) as pool:
        answers = [pool.submit(_weights, job, World(rank, 2, rank, 2, BY_HAND, address)) for rank in range(2)]
        return [answer.result() for answer in answers]


def _weights(job: Job, world: World) -> float:
    with contextlib.closing(TrainingSession(job, world)) as session:
        session.turn()
        model = session.training.ready.model
        return sum(float(weight.detach().double().sum()) for weight in model.parameters())


@pytest.mark.slow
def test_startup_probe_times_each_part(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    result, began = tmp_path / "parts.json", time.monotonic()
    script = ("main_single_gpu.py", "-cfg", tiny, "-output", tmp_path / "run")
    done = vitamp(result, began, *script, script="tools/benchmark_amp/startup_probe.py", slow_start=True)
    passed = time.monotonic() - began
    assert done.code == 0, done.text
    results = json.loads(result.read_text(encoding="utf-8"))
    assert {"python", "import vitamp", "model", "data index", "compiling", "first update", "rest"} <= set(
        results["parts"]
    )
    assert all(seconds >= 0 for seconds in results["parts"].values())
    assert results["parts"]["model"] > 0.001
    assert sum(results["parts"].values()) == pytest.approx(results["seconds"])
    assert results["seconds"] < passed
    assert "Epoch[001" not in done.out, "it ends after a few updates"


@pytest.mark.slow
def test_startup(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("startup", "-rounds", 1)
    assert list(results["turns"]) == ["vitamp", "import torch, timm", "vitamp" + AGAIN]
    assert results["turns"]["vitamp"][0]["parts"]["import torch"] > 0.1
    assert "import torch " in output
    assert "to the first update" in output


@pytest.mark.slow
def test_precisions_makes_jpegs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-iters", "1", "-rounds", "1", "-modes", "bf16", "-image_size", "32", "-made", "8", "-batch_size", "4"]
    assert main(["precisions", *words, "-device", "cpu", f"DATA.CACHE={tmp_path}"]) == 0
    assert len(list((tmp_path / "made").rglob("*.jpg"))) == 8
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("bf16 ")]
    assert row[-1] == "%"
