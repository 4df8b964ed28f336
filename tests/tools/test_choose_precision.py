"""choose_precision.py: it measures the user's own training, and recommends by the results."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.amp.precision import Precision
from engine.setup import setting_of
from tests.conftest import TINY_DIGITS
from tests.engine.small import CPU, build, train, windows
from tests.program import Result, Vitamp, metrics
from tests.tools.conftest import Trainings, interrupted
from tools.choose_precision.command import Baseline, Measured, details, judge, largest_difference, main, recommend
from tools.choose_precision.layers import Layer, Scaled, examine_layers
from tools.common.precisions import BY_NAME, MODES, Mode, mode_of, modes_named, modes_to_measure
from tools.common.sessions import opened
from utils.cli import parse
from utils.config import AmpConfig, Config, load_config

pytestmark = pytest.mark.usefixtures("bf16_cpu")

UPDATES = 12
SCALE = ("AMP.INIT_LOSS_SCALING=1e30", "AMP.USE_DYNAMIC_LOSS_SCALING=false")
GROWING = "TRAIN.SIZE_SCHEDULE=[[0,4],[0.5,8]]"
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
    words = ("-cfg", cfg, "-updates", UPDATES, "-output", root / "out", "-modes", "fp16,bf16", *SCALE, GROWING)
    with pytest.MonkeyPatch.context() as there, contextlib.redirect_stdout(io.StringIO()) as out:
        there.setattr("tools.compare.runs.start", trainings.start)
        code = main([*map(str, words)])
    return code, out.getvalue(), trainings.started


def test_measurements_are_runs(examined: Any, vitamp: Vitamp, tmp_path: Path) -> None:
    """The baseline is exactly what main_single_gpu.py trains; other seeds train differently."""
    cfg, out, found, folder = examined
    assert "images have 4 pixels, as in the first epochs; TRAIN.SIZE_SCHEDULE=[] measures the final size" in out
    run = tmp_path / "run"
    vitamp("-cfg", cfg, "-output", run, "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={UPDATES}", GROWING, code=0)
    theirs = [line["loss"] for line in metrics(run, "train")]
    first, second, third = (run["losses"] for run in found["fp32"]["runs"])
    assert first == theirs
    assert first[0] != second[0] != third[0]
    assert found["runs"] == ["fp32-5", "bf16-5", "fp32-6", "fp16-5", "fp32-7"]
    assert [line["loss"] for line in metrics(folder / "fp32-5", "train")] == theirs
    assert "COMPILE: none" in (folder / "fp32-5" / "config.yaml").read_text(), "auto could choose another way in bf16"


def test_same_command_resumes_finished_runs(examined: Any) -> None:
    cfg, out, found, folder = examined
    (folder / REPORT).rename(folder / "before.json")
    code, again, started = examine(folder.parent, cfg)
    assert code == 0, again
    assert started == []
    repeated = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    assert (repeated["fp32"], repeated["recommendation"]) == (found["fp32"], found["recommendation"])
    assert again.splitlines()[-3:-1] == out.splitlines()[-3:-1]


def test_report(examined: Any) -> None:
    _, out, found, folder = examined
    fp16, bf16 = (next(mode for mode in found["modes"] if mode["name"] == name) for name in ("fp16", "bf16"))
    assert fp16["skipped"] == UPDATES, "its loss scale is far too large"
    assert min(layer["headroom"] for layer in fp16["layers"]) < 1
    assert f"fp16: not recommended: {UPDATES} of {UPDATES} updates were skipped" in out
    assert found["recommendation"]["sentence"].partition(":")[0] in (folder / "report.html").read_text(encoding="utf-8")
    assert "measuring 12 updates of each, about 10 minutes at most (-budget_min): fp32 (three seeds), bf16, fp16" in out
    assert {"command", "started", "device", "versions", "seconds", "recommendation"} <= set(found)
    assert found["device"].startswith("cpu")
    assert len(bf16["losses"]) == UPDATES
    assert bf16["images_per_second"] > 0
    assert bf16["peak_memory_gb"] > 0.1
    assert {layer["name"] for layer in bf16["layers"]} >= {"patch_embed.proj", "blocks.0.attn.qkv", "head"}
    assert 0 < bf16["difference"] < found["fp32"]["seed_noise"]
    assert out.rstrip().splitlines()[-2] == f"Flags: {found['recommendation']['flags']}"
    assert found["recommendation"]["sentence"] in out


@pytest.mark.slow
def test_budget_cuts_measurements_short(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("-cfg", tiny, "-updates", 50000, "-modes", "bf16", "-output", out, "TRAIN.NUM_EPOCHS=5000")
    result = vitamp(*words, "-budget_min", 1.5, script="scripts/choose_precision.py", timeout=300, code=0)
    assert "cut short (-budget_min)" in result.out
    found = json.loads((out / REPORT).read_text(encoding="utf-8"))
    assert all(0 < run["updates"] < 50_000 for run in found["fp32"]["runs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-modes", "bf16,O2_bf16"), "Did you mean O2-bf16? It takes fp32, tf32"),
        (("-modes", "tf32"), "Ampere"),
        (("-modes", "fp32"), "-modes fp32: name a precision other than fp32"),
        (("-modes", "NAIVE-bf16", "AMP.FP32_MODULES=head"), "AMP.FP32_MODULES"),
        (("-eval",), "EVAL"),
    ],
)
def test_bad_input_is_refused_before_measuring(
    in_process: Callable[..., Callable[..., Result]], tiny: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = in_process(main)("-cfg", tiny, "-output", tmp_path / "out", "-device", "cpu", *words, code=2)
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_modes_auto_is_what_amp_means_for_the_model() -> None:
    for name, meant in (("test_resnet", "bf16"), ("test_efficientnet", "fp32")):
        config = load_config(None, words={"MODEL.NAME": name, "DATA.IMAGE_SIZE": "32"}).config
        assert modes_named("auto", config, CPU) == [("auto", BY_NAME[meant])]


def test_existing_report_is_overwritten_only_if_asked(
    in_process: Callable[..., Callable[..., Result]], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / REPORT).write_text("mine", encoding="utf-8")
    result = in_process(main)("-cfg", tiny, "-output", tmp_path, code=2)
    assert f"{REPORT} exists" in result.err
    assert (tmp_path / REPORT).read_text(encoding="utf-8") == "mine"
    monkeypatch.setattr("tools.compare.runs.start", interrupted)
    for words in (("-overwrite",), ()):
        in_process(main)("-cfg", tiny, "-output", tmp_path, "-modes", "bf16", *words, code=130)


# Modes


def test_default_modes_on_a_cpu(tiny: Path) -> None:
    modes, left_out = modes_to_measure(None, load_config(str(tiny)).config, CPU)
    names = [mode.name for mode in modes]
    assert {"bf16", "O2-bf16", "NAIVE-bf16"} <= set(names)
    assert {"tf32", "fp8", "apex", "O3-bf16"} <= set(left_out)
    assert {*names, *left_out, "fp32"} == {mode.name for mode in MODES}
    modes, _ = modes_to_measure("naive-BF16, fp32,bf16", Config(), CPU)
    assert [mode.name for mode in modes] == ["bf16", "NAIVE-bf16"]


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
@pytest.mark.parametrize("settings", [{}, {"LEVEL": "O2", "DTYPE": "fp16", "TF32": "true"}], ids=["plain", "set"])
def test_flags_of_a_mode_select_it(tiny: Path, mode: Any, settings: dict[str, str]) -> None:
    """With any settings in the user's file, the flags select the precision that was measured."""
    text = tiny.read_text(encoding="utf-8")
    tiny.write_text(text + f"AMP: {json.dumps(settings).replace(chr(34), '')}\n", encoding="utf-8")
    given = parse(["-amp", "bf16"], "scripts/choose_precision.py")
    user = load_config(str(tiny), given.flags).config.AMP
    command = parse(mode.flags(user).split(), "main_single_gpu.py")
    selected = load_config(str(tiny), command.flags, command.words).config.AMP
    measured = mode.amp(user)
    keys = {"ENABLED", "DTYPE", "LEVEL", "TF32", *mode.settings} if mode.dtype else ("ENABLED", "TF32")
    assert [getattr(selected, key) for key in keys] == [getattr(measured, key) for key in keys]


# Layers


def test_underflow_and_headroom_are_counted() -> None:
    values = torch.tensor([0.0, 1e-9, -1e-6, 1e-3, -2.0])
    layer = Layer("x", "fp16")
    layer.add(values, Scaled(torch.float16, 1.0))
    assert (layer.values, layer.underflows) == (4, 2)
    assert layer.underflow_share == 0.5
    assert layer.headroom == pytest.approx(65504 / 2)

    layer = Layer("x", "fp16")
    layer.add(values, Scaled(torch.float16, 2.0**17))
    assert layer.underflows == 0
    assert layer.headroom < 1, "the largest value overflows"

    layer = Layer("x", "e4m3")
    layer.add(torch.tensor([[1.0, 2.0**-20], [2.0**-20, 2.0**-20]]), Scaled(torch.float8_e4m3fn, None))
    assert layer.underflows == 3
    assert math.isinf(layer.headroom), "scaled to its maximum, it never overflows"


def test_layers_match_a_plain_backward_pass(tiny: Path) -> None:
    """One layer is counted by hand, with gradients of a plain backward pass; a layer in fp32 is left out."""
    fp16 = {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__FP32_MODULES": "blocks.0.mlp.fc1"}
    ready = build(tiny, TRAIN__ACCUM_ITER=2, **fp16)
    train(ready, 2)
    config = load_config(str(tiny), words={"AMP.ENABLED": "true", "AMP.DTYPE": "fp16"}).config
    share, batch = next(iter(next(windows(ready))))
    scale = 64.0
    layers = {layer.name: layer for layer in examine_layers(config, ready, (share, batch), scale)}
    assert "blocks.0.mlp.fc1" not in layers
    assert layers["head"].dtype == "fp16"

    model, seen = ready.parts.model, []

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        output.register_hook(seen.append)

    handle = model.get_submodule("blocks.0.attn.qkv").register_forward_hook(keep)
    logits = model(ready.inputs(batch.images))
    handle.remove()
    model.zero_grad()
    ready.parts.criterion(logits, batch.labels).backward()
    weights = model.get_submodule("blocks.0.attn.qkv")
    assert share.weight == 0.5
    gradients = [*seen, *(p.grad for p in weights.parameters() if p.grad is not None)]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) * share.weight * scale
    small = (flat.abs() < torch.finfo(torch.float16).tiny) & (flat != 0)
    # Plain and fused attention round a few values differently to zero.
    assert layers["blocks.0.attn.qkv"].values == pytest.approx(int((flat != 0).sum()), rel=0.01)
    assert layers["blocks.0.attn.qkv"].underflows == pytest.approx(int(small.sum()), rel=0.02)
    assert layers["blocks.0.attn.qkv"].headroom == pytest.approx(65504 / float(flat.abs().max()), rel=1e-3)


# The verdict

FALLING = [2.0 - 0.01 * n for n in range(100)]


def run(losses: list[float] = FALLING, speed: float = 100.0, name: str = "bf16", **more: Any) -> Measured:
    given = {"losses": losses, "updates": len(losses), "images_per_second": speed, "peak_memory_gb": 10.0, **more}
    return Measured(name, f"-amp {name}", **given)


def above(by: float, losses: list[float] = FALLING) -> list[float]:
    return [loss + by for loss in losses]


def base(speeds: tuple[float, float, float] = (100.0, 101.0, 99.0)) -> Baseline:
    """Three seeds whose curves differ by up to 0.1."""
    shifts = (0.0, 0.06, -0.04)
    return Baseline([run(above(shift), speed) for shift, speed in zip(shifts, speeds, strict=True)])


def advice(*measured: Measured, against: Baseline | None = None, slow: str = "") -> dict[str, str]:
    """The recommendation, after each is judged."""
    for one in measured:
        judge(one, against or base(), 100, slow)
    return recommend(list(measured), against or base(), "-amp off")


def test_measured_updates_accumulate_as_the_run_does(tiny: Path) -> None:
    config = load_config(str(tiny), words={"TRAIN.GLOBAL_BATCH": "64"}).config
    with opened(config) as (ready, windows):
        assert [share.weight for share in next(windows).shares] == [0.5, 0.5]
        assert (ready.choices["compile"], ready.choices["compile_why"]) == ("none", "as asked for")
        assert not setting_of(ready).compiled, "whoever switched it off may gain by it"
    assert setting_of(build(tiny)).compiled, "auto has found that it would not"


def test_curves_are_smoothed_over_common_updates() -> None:
    spike = FALLING.copy()
    spike[50] += 1.0
    assert largest_difference(FALLING, spike) == pytest.approx(1.0 / 5)  # a twentieth of a hundred
    assert largest_difference(FALLING, above(0.25)[:40]) == pytest.approx(0.25)
    assert math.isinf(largest_difference(FALLING, [math.nan] * 100))
    assert base().seed_noise(100) == pytest.approx(0.1)


def test_fastest_sound_mode_is_recommended() -> None:
    found = advice(run(above(0.004), 190.0, peak_memory_gb=6.2), run(speed=120.0, name="fp16"))
    assert found["flags"] == "-amp bf16"
    assert found["sentence"] == (
        "-amp bf16: 1.9x faster, 38 % less memory; its loss differs from fp32's by at most 0.004; two fp32 seeds "
        "differ by 0.1."
    )


def test_ties_go_to_the_preferred_mode_and_noise_to_the_one_with_less_memory() -> None:
    second = run(speed=200.0, name="O2-bf16")
    assert advice(run(speed=198.0), second)["mode"] == "bf16"
    assert advice(run(speed=150.0), second)["mode"] == "O2-bf16"
    found = advice(run(speed=120.0), against=base((100.0, 130.0, 95.0)))
    assert found["mode"] == "fp32"
    assert "37 %" in found["sentence"]
    found = advice(run(speed=101.0, peak_memory_gb=6.0))
    assert found["mode"] == "bf16"
    assert "no faster, but 40 % less memory" in found["sentence"]


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (run(above(0.3), 300.0), "above all fp32 seeds"),
        (run([math.nan] * 100, 300.0), "inf"),
        (run(speed=300.0, skipped=30), "30 of 100 updates were skipped"),
        (run(FALLING[:30], 300.0), "only 30 updates"),
        (Measured("bf16", failed="out of memory"), "out of memory"),
    ],
)
def test_unsound_mode_is_not_recommended_whatever_its_speed(measured: Measured, reason: str) -> None:
    assert advice(measured)["flags"] == "-amp off"
    assert any(reason in text for text in measured.against), measured.against


def test_lower_loss_and_slightly_fewer_updates_are_accepted() -> None:
    lower, fewer = run(above(-0.3), 150.0), run(FALLING[:80])
    assert advice(lower, fewer)["mode"] == "bf16"
    assert (lower.against, fewer.against) == ([], [])


def test_speed_of_emulation_does_not_count() -> None:
    fp8 = run(speed=500.0, name="fp8")
    assert advice(fp8, slow="emulated on this device, so its speed is meaningless")["mode"] == "fp32"
    assert fp8.speed is None


def test_details_name_the_worst_layers() -> None:
    layers = [Layer("calm", "fp16", 100, 0, 2**20), Layer("steep", "fp16", 100, 40, 3.0)]
    text = "\n".join(details([run(layers=layers, scale=1024.0)], base(), on_gpu=True))
    assert "layers whose gradients underflow most, at scale 1024: steep 40 % (fp16)" in text
    assert "calm" not in text


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_precision_in_the_banner_is_a_value_of_amp(mode: Mode) -> None:
    if mode.name == "tf32":
        pytest.skip("no TF32 on a CPU")
    shown = Precision(mode.amp(AmpConfig()), CPU).name
    typed = load_config(None, parse(["-amp", shown], "main_single_gpu.py").flags).config.AMP
    assert Precision(typed, CPU).name == shown
    assert mode_of(shown, AmpConfig(), CPU) == (BY_NAME["bf16"] if mode.name == "apex" else mode)


def test_apex_replaces_the_users_lists() -> None:
    amp = BY_NAME["apex"].amp(AmpConfig(CUSTOM_WHITE_LIST=("gelu",)))
    assert (amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST) == ((), ("gelu", "layer_norm", "softmax"))
    line = Precision(amp, CPU).line()
    assert line.startswith("bf16 by autocast with gelu, layer_norm, softmax in fp32, no loss scaling needed")
