"""benchmark_amp.py timm: loops with equal losses are measured, and others are refused."""

import json
from pathlib import Path

import pytest
import torch

from bench.benchmark_amp import sessions
from bench.benchmark_amp.command import TIMM_FIXED, apart, main
from bench.benchmark_amp.loops import COMPARED, loop_of, random_batches
from bench.benchmark_amp.plan import FUSED, OURS, TIMM, Way
from tests.engine.small import CPU
from utils.config import Config, load_config
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE

TRAIN_PY = '''
"""The parts of a train.py that are used: a parser, and a loop that takes a model or a task."""
import argparse
from contextlib import suppress

parser = argparse.ArgumentParser()
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--model-ema", action="store_true")
CALLS = []


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, lr_scheduler, amp_autocast=suppress,
                    loss_scaler=None, model_ema=None):
    import torch

    CALLS.append(len(loader))
    total, number = 0.0, 0
    for images, targets in loader:
        with amp_autocast():
            loss = loss_fn(model(images), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        model_ema.update(model, step=number)
        lr_scheduler.step_update(num_updates=number, metric=0.0)
        total += loss.item()
    return {"loss": total / number}
'''


@pytest.fixture
def config(tiny: Path) -> Config:
    torch.set_num_threads(1)
    return load_config(str(tiny), words={key: json.dumps(value) for key, value in TIMM_FIXED.items()}).config


def losses(config: Config, way: Way, updates: int = COMPARED) -> list[float]:
    loop = loop_of(way, config, CPU)
    return [loop.train_one(batch) for batch in random_batches(config, CPU)[:updates]]


def test_table(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timm.json"
    flags = ["-updates", "2", "-rounds", "1", "-precisions", "bf16,fp32", "-json", str(path)]
    recipe = tmp_path / "regularised.yaml"
    more = "MODEL: {DROPOUT: 0.1}\nTRAIN: {SMOOTHING: 0.1, LINEAR_SCALED_LR: 64}"
    recipe.write_text(f"BASE: [{tiny}]\n{more}\nAMP: {{CUSTOM_BLACK_LIST: [softmax]}}\n")
    assert main(["timm", "-cfg", str(recipe), *flags]) == EXIT_DONE
    results, out = json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out
    loops = [f"{who}, {p}" for p in ("fp32", "bf16") for who in ("timm", "timm, fused", "ours")]
    assert list(results["turns"]) == [*loops, "timm, fp32, again"]
    for (turn,) in results["turns"].values():
        assert turn["images_per_second"] == pytest.approx(2 * 32 / turn["seconds"])
        assert len(turn["losses"]) == COMPARED
        assert 0 < turn["cpu_seconds"] < 1.5 * turn["seconds"] + 0.1
    rows = {line.strip().split("  ")[0]: line for line in out.splitlines()}
    assert all(name in rows for name in loops), out
    assert "1.00 (1.00 to 1.00)" in rows["timm, fp32"]
    assert "timm's loop: parts of its package" in out


@pytest.mark.parametrize("kind", [OURS, FUSED])
def test_loop_has_the_losses_of_timms(config: Config, kind: str) -> None:
    """Far beyond the warm-up, to compare the whole schedule."""
    config = config.changed(TRAIN={"NUM_EPOCHS": 0.16, "WARMUP_EPOCHS": 0.05})
    own, timms = (losses(config, Way(who, "fp32"), 16) for who in (kind, TIMM))
    assert abs(timms[0] - timms[-1]) > 0.01, "it learns, so equality means something"
    assert apart(own, timms) < 2e-6


def test_all_loops_autocast_to_bf16(config: Config) -> None:
    curves = [losses(config, Way(kind, "bf16")) for kind in (TIMM, FUSED, OURS)]
    exact = losses(config, Way(TIMM, "fp32"))
    for curve in curves:
        assert 1e-6 < apart(curve, exact) < 1e-2


@pytest.mark.parametrize("second", [2.0003, float("nan")])
def test_loop_with_other_losses_is_refused(
    second: float, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sessions, "own_process", lambda: None)
    answers = iter([[1.0, 2.0], [1.0, 2.0], [1.0, second], [1.0, 2.0]])
    monkeypatch.setattr(sessions.Worker, "start", lambda _: {"losses": next(answers)})
    code = main(["timm", "-cfg", str(tiny), "-precisions", "fp32", "-updates", "1", "-rounds", "1"])
    output = capsys.readouterr()
    assert code == EXIT_FAILED
    assert "the losses do not agree, so nothing is measured" in output.err
    assert f"  ours, fp32: 1.0000000, {second:.7f}; differs from timm, fp32 by" in output.err
    assert "timm, fused, fp32: " not in output.err.partition("do not agree")[2]
    assert "images/s" not in output.out


def test_loop_of_train_py_runs(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN_PY, encoding="utf-8")
    way = Way(TIMM, "fp32", train_py=path)
    config = config.changed(TRAIN={"WARMUP_EPOCHS": 0.05})
    loop, batches = loop_of(way, config, CPU), random_batches(config, CPU)
    assert [loop.train_one(batch) for batch in batches[:COMPARED]] == losses(config, Way(TIMM, "fp32"))
    loop.train(batches[:3])
    calls = vars(loop)["_loop"].__globals__["CALLS"]
    assert calls == [1] * COMPARED + [3], "one call per compared update, and one per turn"


@pytest.mark.parametrize(
    ("text", "output"),
    [("import nothing_of_that_name", "cannot be imported"), ("x = 1", "lacks train_one_epoch"), (None, "No such file")],
)
def test_invalid_train_py_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, output: str
) -> None:
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["timm", "-cfg", str(tiny), "-timm_train", str(path), "-updates", "1"]) == EXIT_USAGE
    assert output in capsys.readouterr().err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("cuDNN: CUDNN_STATUS_ALLOC_FAILED")])
def test_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def full() -> sessions.Metrics:
        raise error

    monkeypatch.setattr(sessions, "start_log", lambda **_: None)
    assert sessions.attempt(full) == {"failed": "out of memory"}
