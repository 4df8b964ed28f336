"""Tables of benchmark_amp.py, each measured once at a small size, with real processes and updates."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.patch_dropout import PatchDropout

from bench.benchmark_amp.command import OFF, ON, compiler_settings, main
from bench.benchmark_amp.loops import SimpleNet
from bench.benchmark_amp.plan import AGAIN
from bench.benchmark_amp.sessions import OUT_OF_MEMORY, Session, TrainingSession, Worker, own_process
from tests.program import ROOT, Vitamp
from utils.config import load_config
from utils.errors import UserError
from utils.precisions import PRECISIONS
from utils.seeding import seed_all

Fields = dict[str, Any]


def test_a_session_drops_tokens_as_the_run_does(tiny: Path) -> None:
    words = {"TRAIN.TOKEN_DROP": "0.5", "TRAIN.NUM_EPOCHS": "4", "DEVICE": "cpu"}
    session = TrainingSession(load_config(str(tiny), words=words).config, updates=1)
    modules = session.ready.model.modules()
    assert [module.prob for module in modules if isinstance(module, PatchDropout)] == [0.5]


def test_a_session_has_the_settings_of_the_compiler_that_are_tried(tiny: Path) -> None:
    import torch._inductor.config as inductor

    config = load_config(str(tiny), words={"DEVICE": "cpu"}).config
    tried = ["inductor.max_autotune_gemm=true", "inductor.triton.mix_order_reduction=false"]
    with ExitStack() as settings:
        session = TrainingSession(config, updates=1, compiler=compiler_settings(tried))
        settings.push(session._opened)
        assert (inductor.max_autotune_gemm, inductor.triton.mix_order_reduction) == (True, False)
    assert (inductor.max_autotune_gemm, inductor.triton.mix_order_reduction) == (False, True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("inductor.max_autotune_gem=true", "has no setting 'max_autotune_gem'. Did you mean max_autotune_gemm"),
        ("inductor.max_autotune_gemm=yes", "expected a value such as true"),
    ],
)
def test_settings_that_the_compiler_does_not_have_are_rejected(word: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        compiler_settings([word])


@pytest.fixture
def measured(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Fields, str]]:
    """`measured("amp", "-iters", 2)` runs a table; returns the -json file and the printed report."""

    def call(table: str, *words: object) -> tuple[Fields, str]:
        assert main([str(word) for word in (table, "-cfg", tiny, *words, "-json", tmp_path / "t.json")]) == 0
        output = capsys.readouterr().out
        results = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
        assert not any("failed" in turn for turns in results["turns"].values() for turn in turns)
        assert results["versions"]["torch"] in output
        assert results["device"] in output
        return results, output

    return call


def test_amp(measured: Callable[..., tuple[Fields, str]]) -> None:
    results, output = measured("amp", "-iters", 2, "-windows", 2)
    off, on, again = ([turn["seconds"] for turn in results["turns"][name]] for name in (OFF, ON, OFF + AGAIN))
    assert [len(off), len(on), len(again)] == [2, 2, 2]
    rows = {line.strip().partition("  ")[0]: line.split() for line in output.splitlines()}
    assert rows[ON][2:6] == [f"{value:.4g}" for value in (*on, sum(on) / 2, sum(off) / sum(on))]
    assert rows[OFF][2:5] == [f"{value:.4g}" for value in (*off, sum(off) / 2)]
    assert [results["turns"][name][0]["precision"] for name in (OFF, ON)] == ["fp32", "bf16"]
    assert all(turn["images_per_second"] * turn["seconds"] == pytest.approx(64) for turn in results["turns"][ON])


SMALL = ("-image_size", 32, "-batch_size", 4, "-num_classes", 4, "DATA.IMAGE_CHANNELS=3")
VIT = ("-model", "tiny", "MODEL.PATCH_SIZE=16", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")


@pytest.mark.slow
def test_amp_measures_the_images_of_data_path(
    imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], vitamp: Vitamp
) -> None:
    """Its layout is recognised; a folder that does not exist is refused, and so is any by tables that read none."""
    words = ("amp", *VIT, *SMALL, "-num_workers", 0, "-device", "cpu", "-iters", 2, "-windows", 1)
    out = tmp_path / "amp.json"
    done = vitamp(*words, "-data_path", imagenet, "-json", out, script="scripts/benchmark_amp.py", code=0)
    (line,) = [line for line in done.out.splitlines() if line.strip().startswith("images: ")]
    assert re.search(rf"images: those of imagenet2012 in {imagenet}; waiting for data: at most \d+ %", line), line
    turns = [turn for turns in json.loads(out.read_text())["turns"].values() for turn in turns]
    assert all(turn["data_wait_percent"] > 0 for turn in turns), "files are read by the training process"
    done = vitamp(*words, script="scripts/benchmark_amp.py")
    assert "images: synthetic (made on the device); waiting for data: " in done.out
    for table, path, said in (
        ("amp", tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
        ("precisions", tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
        *((table, imagenet, f"-data_path {imagenet}: this table measures no files") for table in ("simplenet", "timm")),
    ):
        assert main([table, "-data_path", str(path), "-device", "cpu", *map(str, (*VIT, *SMALL))]) == 2
        assert said in capsys.readouterr().err


def test_trainings_end_for_each_other_without_memory_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[Worker] = []
    workers = [Worker(Session, beside) for _ in range(2)]

    def memory_for_one(worker: Worker) -> dict[str, Any]:
        worker._pool = own_process()
        return {"failed": OUT_OF_MEMORY} if sum(other.is_running for other in beside) > 1 else {"seconds": 1.0}

    monkeypatch.setattr(Worker, "_try", memory_for_one)
    for worker in (*workers, *workers):
        assert worker.turn() == {"seconds": 1.0}
        assert [other.is_running for other in workers] == [other is worker for other in workers]
    monkeypatch.setattr(Worker, "_try", lambda _: {"failed": OUT_OF_MEMORY})
    assert workers[0].turn() == {"failed": OUT_OF_MEMORY}, "memory for none"


def test_precisions(measured: Callable[..., tuple[Fields, str]], imagenet: Path) -> None:
    """From files, if a data set is named."""
    data = ("-dataset", "imagenet2012", "-data_path", imagenet, *SMALL, "-num_workers", 0, "TRAIN.GLOBAL_BATCH=8")
    results, output = measured("precisions", *data, "-modes", "O2-bf16", "-iters", 1, "-rounds", 1)
    assert list(results["turns"]) == [
        "fp32, synthetic", "O2-bf16, synthetic", "fp32, synthetic, again", "fp32, files", "O2-bf16, files"
    ]  # fmt: skip
    assert {name: turns[0]["precision"] for name, turns in results["turns"].items()} == {
        name: "O2-bf16" if name.startswith("O2") else "fp32" for name in results["turns"]
    }
    assert "an iteration is one update of 2 micro-batches of 4 images" in output
    assert all(0.1 < turns[0]["peak_memory_gb"] < 3 for turns in results["turns"].values())
    (row,) = [line.split() for line in output.splitlines() if line.strip().startswith("O2-bf16")][-1:]
    fast, base = (results["turns"][f"{mode}, synthetic"][0]["images_per_second"] for mode in ("O2-bf16", "fp32"))
    assert f"{fast / base:.2f}" in row


def test_settings(measured: Callable[..., tuple[Fields, str]]) -> None:
    less = "-amp off MODEL.DEPTH=1"
    results, output = measured(
        "settings", "-amp", "bf16", "-try", "SPEED=plain", f"-try={less}", "-iters", 1, *("-rounds", 1)
    )
    assert {name: turns[0]["precision"] for name, turns in results["turns"].items()} == {
        "given": "bf16", "given, again": "bf16", "SPEED=plain": "bf16", less: "fp32"
    }  # fmt: skip
    assert [results["turns"][name][0]["choices"]["linear_patches"] for name in ("given", "SPEED=plain")] == [
        True,
        False,
    ]
    assert f"  {less} " in output
    assert "control: `given` against itself" in output


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


def test_simplenet_computes_in_the_precision_that_is_asked_for(tiny: Path) -> None:
    config, cpu, losses = load_config(str(tiny)).config, torch.device("cpu"), set[float]()
    for name in ("fp32", "bf16", "O3-bf16", "fp8"):
        net = SimpleNet(config.changed(AMP=PRECISIONS[name]), cpu, 16, 2, name != "fp32", 1)
        losses.add(net.turn()["loss"])
    assert len(losses) == 4


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


COMMANDS = {
    "amp": "benchmark_amp.py amp -iters 2 -windows 2",
    "precisions": "benchmark_amp.py precisions -modes bf16 -iters 2 -rounds 1",
    "timm": "benchmark_amp.py timm -precisions fp32 -updates 2 -rounds 1",
    "choose_precision": "choose_precision.py -modes bf16 -updates 5",
}


@pytest.mark.skipif(sys.platform != "linux", reason="a session's processes are read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_command_leaves_no_process(name: str, imagenet: Path, tmp_path: Path) -> None:
    """choose_precision.py leaves none either. Files are read by two workers."""
    files = () if name == "timm" else ("-dataset", "imagenet2012", "-data_path", imagenet)
    output = ("-output", tmp_path / "out") if name == "choose_precision" else ()
    script, *words = COMMANDS[name].split()
    words += map(str, (*files, *VIT, *SMALL, "-num_workers", 2, "-device", "cpu", "-threads", 1, *output))
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(180)
        except subprocess.TimeoutExpired:
            code = None
    deadline = time.monotonic() + 10  # for multiprocessing's servers, which exit once all their clients have exited
    while (left := list(_processes_of(process.pid))) and code is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert code == 0, text
    assert "failed" not in text
    assert not left, text


def _processes_of(session: int) -> Iterator[int]:
    """Running processes of a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            yield int(stat.parent.name)
