"""Whether, and what of, an update is compiled: by the settings, the device, the run's length, and the run before."""

import json
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from engine.compile import choice
from engine.compile.choice import choose_compiling, training_flops
from models.build import build_without_weights
from tests.engine.small import OFF, parts_of
from tests.program import Vitamp, write_meta
from utils.config import Config, ModelConfig, TrainConfig
from utils.distributed.world import ALONE, World
from utils.errors import UserError

TWO = World(rank=0, size=2, local_rank=0, local_size=2)
LONG, SHORT = 500_000, 100
Chosen = namedtuple("Chosen", ("how", "reason"))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that agree in everything."""
    monkeypatch.setattr(choice, "on_every_rank", lambda _, work: work())
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
    fp8: bool = False,
    level: str = "O0",
    sharded: bool = False,
    of_trial: tuple[str, str] | None = None,
    **train: Any,
) -> Chosen:
    model = model or timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10, img_size=32)
    parts = parts_of(model, torch.optim.SGD(model.parameters()), OFF)
    parts.precision.device, parts.precision.fp8 = torch.device(device), fp8
    parts.precision.level, parts.sharding = level, object() if sharded else None  # pyright: ignore[reportAttributeAccessIssue]
    choices = {} if kept is None else {"compile": kept, "computed_in": f"{began_on or device} fp32"}
    return Chosen(*choose_compiling(Config(TRAIN=TrainConfig(**train)), parts, world, updates, choices, of_trial))


def test_cpu_compiles_only_on_request() -> None:
    assert choose().how == "none"
    assert choose(COMPILE="whole") == ("whole", "as asked for")
    assert choose(COMPILE="blocks").how == "blocks"
    with pytest.raises(UserError, match="Linear has no sequence of equal blocks to compile; use whole or none"):
        choose(nn.Linear(2, 2), COMPILE="blocks")


@pytest.mark.usefixtures("gpu")
def test_gpu_compiles_where_it_is_worthwhile() -> None:
    assert "no more than 2 times" in choose(device="cuda", updates=SHORT).reason
    assert choose(device="cuda", updates=LONG, GRAD_CHECKPOINT="blocks").how == "blocks"
    assert "500,000 updates" in choose(device="cuda", updates=LONG).reason
    growing: dict[str, Any] = {"NUM_EPOCHS": 4, "SIZE_SCHEDULE": ((0.0, 112), (0.5, 224)), "TOKEN_DROP": 0.5}
    runs = [choose(device="cuda", **train).reason for train in ({}, growing, {**growing, "TOKEN_DROP_TAIL": 1})]
    seconds = [[*map(int, re.findall(r"(\d+) s ", run.replace(",", "")))] for run in runs]
    assert [cost for _, cost in seconds] == [60, 120, 180], "compiled anew for each size, and for all tokens"
    assert [gain / seconds[0][0] for gain, _ in seconds] == pytest.approx([1, 2.5 / 8, 3.5 / 8], rel=1e-4)
    assert choose(device="cuda", updates=SHORT, of_trial=("whole", "in the trial")) == ("whole", "in the trial")


@pytest.mark.usefixtures("gpu", "two")
def test_several_processes_compile_blocks() -> None:
    assert choose(device="cuda", world=TWO).how == "blocks"
    asked = choose(device="cuda", world=TWO, COMPILE="whole")
    assert asked.how == "blocks"
    assert "all-reduce of gradients" in asked.reason
    assert choose(device="cuda", world=TWO, COMPILE="whole", level="O2").how == "whole"
    assert choose(device="cuda", world=TWO, COMPILE="whole", level="O2", sharded=True).how == "blocks"
    without_blocks = choose(nn.Linear(2, 2), device="cuda", world=TWO)
    assert without_blocks.how == "none"
    assert without_blocks.reason.endswith("and Linear has no blocks to compile one by one")


@pytest.mark.usefixtures("gpu")
def test_fp8_that_auto_does_not_compile_is_warned_of(said: pytest.LogCaptureFixture) -> None:
    assert choose(device="cuda", updates=LONG, fp8=True).how == "whole"
    choose(device="cuda", updates=SHORT, fp8=True, COMPILE="none")
    choose(device="cuda", updates=SHORT)
    assert "fp8" not in said.text
    assert choose(device="cuda", updates=SHORT, fp8=True).how == "none"
    assert "set TRAIN.COMPILE=whole, or use -amp bf16" in said.text


@pytest.mark.usefixtures("gpu")
def test_resumed_run_keeps_its_choice_on_such_a_device_unless_set() -> None:
    assert choose(kept="whole") == ("whole", "as before the resume")
    assert choose(kept="whole", COMPILE="none").how == "none"
    assert choose(kept="none", COMPILE="blocks").how == "blocks"
    assert choose(kept="whole", began_on="cuda") == ("none", choose().reason)
    assert choose(kept="none", began_on="cpu", device="cuda").how == "whole"
    assert choose(kept="whole", began_on="cuda", COMPILE="blocks").how == "blocks", "as asked for"


def test_gpu_checkpoint_resumes_on_a_cpu_without_compiling(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, "TRAIN.NUM_EPOCHS=2", "SAVE_FREQ=1")
    vitamp(*words, "TRAIN.MAX_UPDATES=45", code=0)
    for meta in run.glob("checkpoints/step-*/meta.json"):
        told = json.loads(meta.read_text())
        told["choices"] |= {"compile": "whole", "computed_in": "cuda fp32"}
        write_meta(meta, told)
    done = vitamp(*words, "-resume", "auto", env={"CXX": "no-such-compiler"}, code=0)
    assert "compile    none (auto: on cpu compiling takes longer than it saves)" in done.out
    assert json.loads((run / "run.json").read_text())["choices"]["compile"] == "none"
    last = max(run.glob("checkpoints/step-*"))
    assert json.loads((last / "meta.json").read_text())["choices"]["compile"] == "none"


def test_missing_compiler_is_one_clear_error(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.COMPILE=whole")
    done = vitamp(*words, env={"CXX": "no-such-compiler"}, code=2)
    assert "TRAIN.COMPILE whole: torch.compile needs a compiler, and there is no no-such-compiler" in done.text
    assert "set TRAIN.COMPILE=none" in done.text


def test_missing_python_headers_prevent_compiling(gpu: Path) -> None:
    """Which are not there where Python came without what programs in C need of it."""
    assert choose(device="cuda").how == "whole"
    (gpu / "Python.h").unlink()
    assert "no " + str(gpu / "Python.h") in choose(device="cuda").reason
    with pytest.raises(UserError, match=r"TRAIN\.COMPILE blocks: torch\.compile needs Python's headers"):
        choose(device="cuda", COMPILE="blocks")


@pytest.mark.parametrize(("name", "gflops"), [("vit_base_patch16_224", 105.151758), ("resnet50", 24.299078)])
def test_flops_of_known_models(name: str, gflops: float) -> None:
    """Attention included; backward takes twice the forward pass, but for the pixels, which want no gradient."""
    model = build_without_weights(ModelConfig(NAME=name, TYPE="x"), 224, 3)
    assert training_flops(model, (3, 224, 224)) == pytest.approx(gflops * 1e9, rel=1e-7)
    assert training_flops(nn.Identity(), (3, 8, 8)) is None, "unknown"
