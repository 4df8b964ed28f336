"""Whether, and what of, an update is compiled: by the settings, the device, the run's length, and the run before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from engine.compile import choice
from engine.compile.choice import CompileChoice, choose_compiling
from engine.compile.gain import gain
from tests.engine.small import OFF, parts_of
from utils.config import Config, TrainConfig, load_config
from utils.distributed.world import ALONE, World
from utils.errors import UserError

Settings = dict[str, Any]
TWO = World(rank=0, size=2, local_rank=0, local_size=2)
LONG, SHORT = 500_000, 100


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that agree in everything."""
    monkeypatch.setattr(choice, "together", lambda _, work: work())
    monkeypatch.setattr(choice, "broadcast", lambda value, _: value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with all that compiling takes; gives the folder of Python's headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(choice.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(choice.shutil, "which", lambda name: f"/usr/bin/{name}")
    return tmp_path


def choose(
    model: nn.Module | None = None,
    world: World = ALONE,
    updates: int = LONG,
    kept: str | None = None,
    device: str = "cpu",
    began_on: str | None = None,
    **train: Any,
) -> CompileChoice:
    model = model or timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10, img_size=32)
    parts = parts_of(model, torch.optim.SGD(model.parameters()), OFF)
    parts.precision.device = torch.device(device)
    choices = {} if kept is None else {"compile": kept, "computed_in": f"{began_on or device} fp32"}
    return choose_compiling(Config(TRAIN=TrainConfig(**train)), parts, world, updates, choices)


def test_a_cpu_compiles_what_it_is_asked_to_and_no_more() -> None:
    assert choose().how == "none"
    assert "on cpu" in choose().reason
    assert choose(COMPILE="whole") == CompileChoice("whole", "default", "as asked for")
    assert choose(COMPILE="blocks").how == "blocks"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_compiles_where_it_repays() -> None:
    assert choose(device="cuda", updates=SHORT).how == "none"
    assert "too little" in choose(device="cuda", updates=SHORT).reason
    assert choose(device="cuda", updates=LONG).how == "whole"
    assert choose(device="cuda", updates=LONG, GRAD_CHECKPOINT="blocks").how == "blocks"
    assert "500,000 updates" in choose(device="cuda", updates=LONG).reason


@pytest.mark.usefixtures("gpu", "two")
def test_many_processes_compile_blocks_so_that_gradients_travel_early() -> None:
    assert choose(device="cuda", world=TWO).how == "blocks"
    asked = choose(device="cuda", world=TWO, COMPILE="whole")
    assert asked.how == "blocks"
    assert "exchange gradients" in asked.reason
    assert choose(nn.Linear(2, 2), device="cuda", world=TWO).how == "none", "there are no blocks in it"


@pytest.mark.usefixtures("gpu")
def test_a_resumed_run_keeps_its_choice_unless_told_otherwise() -> None:
    assert choose(kept="whole") == CompileChoice("whole", "default", "as this run had it")
    assert choose(kept="whole", COMPILE="none").how == "none"
    assert choose(kept="none", COMPILE="blocks").how == "blocks"


@pytest.mark.usefixtures("gpu")
def test_a_run_resumed_on_another_kind_of_device_chooses_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    on_cpu = choose(kept="whole", began_on="cuda")
    assert on_cpu == CompileChoice("none", "default", choose().reason)
    said = "Whether to compile is chosen anew: this run had TRAIN.COMPILE whole on cuda, and now is on cpu."
    assert caplog.messages == [said]
    assert choose(kept="none", began_on="cpu", device="cuda").how == "whole"
    assert choose(kept="whole", began_on="cuda", COMPILE="blocks").how == "blocks", "as asked for"


@pytest.mark.usefixtures("gpu")
def test_a_run_resumed_where_there_is_no_compiler_chooses_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(choice.shutil, "which", lambda _: None)
    assert choose(kept="whole", device="cuda").how == "none"
    assert "this run had TRAIN.COMPILE whole before, and now torch.compile needs a compiler" in caplog.text


def test_a_checkpoint_of_a_gpu_resumes_on_a_cpu_uncompiled(vitamp: Callable, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, "TRAIN.NUM_EPOCHS=2", "SAVE_FREQ=1")
    assert vitamp(*words, "TRAIN.MAX_UPDATES=45").code == 0
    for meta in run.glob("checkpoints/step-*/meta.json"):
        told = json.loads(meta.read_text())
        told["choices"] |= {"compile": "whole", "computed_in": "cuda fp32"}
        meta.write_text(json.dumps(told))
    done = vitamp(*words, "-resume", "auto", env={"CXX": "no-such-compiler"})
    assert done.code == 0, done.text
    assert "this run had TRAIN.COMPILE whole on cuda, and now is on cpu" in done.out
    assert "compile    none (auto: on cpu compiling takes longer than it saves)" in done.out


@pytest.mark.parametrize(
    ("train", "device", "words"),
    [
        ({"COMPILE": "whole", "COMPILE_MODE": "reduce-overhead"}, "cpu", "CUDA graphs are for GPUs"),
        ({"COMPILE": "blocks", "COMPILE_MODE": "reduce-overhead"}, "cuda", "TRAIN.COMPILE whole in one process"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_cuda_graphs_hold_the_whole_of_one_process_on_a_gpu(train: Settings, device: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose(device=device, **train)


def test_max_autotune_does_not_bring_cuda_graphs_along() -> None:
    modes = {mode: CompileChoice("whole", mode, "").torch_mode for mode in ("default", "max-autotune")}
    assert modes == {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    assert CompileChoice("whole", "reduce-overhead", "").torch_mode == "reduce-overhead"


def test_a_model_without_blocks_is_not_compiled_by_blocks() -> None:
    with pytest.raises(UserError, match="Linear has no row of like blocks; use whole or none"):
        choose(nn.Linear(2, 2), COMPILE="blocks")


def test_without_a_compiler_there_is_one_clear_error(vitamp: Callable, tiny: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.COMPILE=whole", env={"CXX": "no-such-compiler"})
    assert done.code == 2, done.text
    assert "TRAIN.COMPILE whole: torch.compile needs a compiler, and here is no no-such-compiler" in done.text
    assert "set TRAIN.COMPILE=none" in done.text
    assert "Traceback" not in done.text


def test_what_is_saved_is_larger_for_larger_work() -> None:
    small = gain(1e9, samples=32, accumulated=1, updates=1000, half=False)
    large = gain(1e11, samples=256, accumulated=4, updates=1000, half=False)
    assert small.seconds == pytest.approx(2.0), "the least there is: 2 ms an update"
    assert large.seconds == pytest.approx(0.2 * 1e11 * 256 * 4 * 1000 / 4e13)
    assert gain(1e11, 256, 4, 1000, half=True).seconds < large.seconds
    assert large.pays
    assert not small.pays
    assert not gain(None, 256, 1, 1000, half=True).pays


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"DIST.STATIC_GRAPH": "true", "TRAIN.ACCUM_ITER": "2"}, "DIST.STATIC_GRAPH: true works only without accum"),
        ({"DIST.BF16_GRADIENTS": "true", "AMP.ENABLED": "true", "AMP.LEVEL": "O2"}, "is not possible at AMP.LEVEL O2"),
        ({"DIST.BF16_GRADIENTS": "true", "DIST.STRATEGY": "fsdp"}, "is not possible with DIST.STRATEGY fsdp"),
    ],
)
def test_settings_of_ddp_go_with_ddp_alone(tiny: Path, words: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_config(str(tiny), words=words)


def test_the_choice_is_saved_with_the_run(vitamp: Callable, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=2", "TRAIN.NUM_EPOCHS=1")
    assert done.code == 0, done.text
    assert "compile    none (auto: on cpu compiling takes longer than it saves)" in done.text
    assert '"compile": "none"' in (run / "run.json").read_text()
    (meta,) = run.glob("checkpoints/step-*/meta.json")
    assert '"compile": "none"' in meta.read_text()


def test_without_the_headers_of_python_nothing_is_compiled(gpu: Path) -> None:
    """Which are not there where Python came without what programs in C need of it."""
    assert choose(device="cuda").how == "whole"
    (gpu / "Python.h").unlink()
    assert "no " + str(gpu / "Python.h") in choose(device="cuda").reason
    with pytest.raises(UserError, match=r"TRAIN\.COMPILE blocks: torch\.compile needs Python's headers"):
        choose(device="cuda", COMPILE="blocks")
