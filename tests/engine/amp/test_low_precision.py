"""What AMP makes of a model: half-precision copies over fp32 masters, modules in fp32, fp8 layers, cast weights."""

import copy
import logging
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import timm
import torch
from small_vit import aot, batch, small_vit, step
from timm.layers.std_conv import StdConv2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.amp import low_precision
from engine.amp.low_precision import cast_weights, force_fp32, forced_modules
from engine.amp.overflow import OverflowWatch
from engine.amp.precision import Precision, check_amp
from engine.speed.convolutions import LinearPatches
from engine.update import TrainState, train_update
from tests.engine.amp.modes import FP32, MODES, PLAIN_STEPS, amp, change
from tests.engine.small import Scale, build, built_of, flat, parts_of, window_of, windows
from utils.config import AmpConfig, TrainConfig
from utils.errors import UserError
from utils.log import log

# ---- a half-precision copy that computes over fp32 masters


def parts_at(
    level: str, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str = "bf16", **options: Any
) -> TrainState:
    parts = parts_of(model, optimizer, amp(DTYPE=dtype, LEVEL=level, INIT_LOSS_SCALING=1.0), **options)
    parts.assemble()
    return parts


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_small_gradients_add_up_over_micro_batches(level: str) -> None:
    """1 + 16 times 1/1024 is 1 in bf16, each time anew. A tied weight gets the gradients of both its uses."""
    model = nn.Sequential(Scale(), tied := Scale())
    tied.weight = model[0].weight  # pyright: ignore[reportAttributeAccessIssue]
    parts = parts_at(level, model, torch.optim.SGD(model.parameters(), lr=1.0))
    images = [flat(1.0), *[flat(2.0**-10) for _ in range(16)]]
    train_update(parts, window_of(*images, weights=(1.0,) * 17), 1)
    assert 1 - tied.weight.item() == pytest.approx(2 * (1 + 16 * 2.0**-10), abs=1e-6)


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_masters_accumulate_updates_smaller_than_half_precision(level: str) -> None:
    model = Scale()
    parts = parts_at(level, model, torch.optim.SGD(model.parameters(), lr=1.0))
    copied = next(parts.forward.parameters())
    for update in range(1, 9):
        train_update(parts, window_of(flat(-(2.0**-11))), update)
    assert model.weight.item() == 1 + 8 * 2.0**-11
    assert copied.item() == model.weight.bfloat16().item()
    for update in range(9, 17):
        train_update(parts, window_of(flat(-(2.0**-11))), update)
    assert copied.item() == 1 + 2.0**-7, "by now it is seen"


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("level", ["O2", "NAIVE"])
def test_running_statistics_are_those_of_the_masters(level: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    usual, before = copy.deepcopy(model), statistics(model)
    batches = [torch.randn(4, 3, 32, 32) for _ in range(6)]
    computing = {}
    for one, its_level in ((model, level), (usual, "O1")):
        parts = parts_at(its_level, one, torch.optim.SGD(one.parameters(), lr=0.01), criterion=nn.CrossEntropyLoss())
        for update in range(3):
            train_update(parts, window_of(*batches[2 * update : 2 * update + 2]), update + 1)
        computing[its_level] = parts.forward
    ours, theirs = statistics(model), statistics(usual)
    assert {t.dtype for t in ours.values() if t.is_floating_point()} == {FP32}
    counts = {name: int(t) for name, t in ours.items() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {6}, "three updates of two micro-batches"
    means = [name for name in ours if "running" in name]
    assert means
    for name in means:
        stepped = (theirs[name] - before[name]).norm()
        assert stepped > 0
        assert (ours[name] - theirs[name]).norm() < 0.05 * stepped, name
    copied = dict(computing[level].named_buffers())
    assert all(copied[name] is buffer for name, buffer in model.named_buffers())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "NAIVE"])
def test_skipped_update_leaves_the_running_statistics(level: str, on_device: bool) -> None:
    model, images = timm.create_model("test_resnet", num_classes=10), torch.randn(2, 3, 16, 16)
    parts = parts_at(level, model, torch.optim.SGD(model.parameters()), "fp16", criterion=nn.CrossEntropyLoss())
    if on_device:  # as with a fused optimiser on a GPU
        parts.leave_out(OverflowWatch)  # it waits for an event, and a CPU has none
        step = parts.precision.step
        parts.precision.step = lambda optimizer: torch.tensor(step(optimizer))
    for update, factor in enumerate((1.0, torch.inf, 1.0), 1):
        before = statistics(model)
        train_update(parts, window_of(images, factor * images), update)
        same = [torch.equal(now, before[name]) for name, now in statistics(model).items() if "running" in name]
        assert set(same) == {factor == torch.inf}


def test_naive_computes_with_masks_and_biases_of_16_bits() -> None:
    model = timm.create_model("swinv2_tiny_window8_256", img_size=64, depths=(2,), embed_dim=32, num_heads=(2,))
    parts = parts_at("NAIVE", model, torch.optim.SGD(model.parameters()), criterion=nn.CrossEntropyLoss())
    train_update(parts, window_of(torch.randn(2, 3, 64, 64)), 1)


# ---- AMP.FP32_MODULES

ALL = ["patch_embed", "blocks.*", "norm", "head"]


def output_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """What each module gave in one forward pass under autocast."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        return lambda _module, _args, output: seen.update({name: output.dtype})

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()[0])
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        (["head"], ["head"]),
        (["blocks.*.attn"], ["blocks.0.attn", "blocks.1.attn"]),
        (["blocks.1.mlp.fc?"], ["blocks.1.mlp.fc1", "blocks.1.mlp.fc2"]),
        (["blocks.[1-9]", "blocks.1.mlp"], ["blocks.1"]),
        (["LayerNorm"], [f"{block}.norm{n}" for block in ("blocks.0", "blocks.1") for n in (1, 2)] + ["norm"]),
        (["Attention", "head"], ["blocks.0.attn", "blocks.1.attn", "head"]),
        # Sequential: checkpointing calls its members, not itself.
        (["blocks"], ["blocks.0", "blocks.1"]),
    ],
)
def test_patterns_force_the_outermost_matching_modules(patterns: list[str], taken: list[str]) -> None:
    model = small_vit()
    assert force_fp32(model, patterns, "cpu") == taken
    assert forced_modules(model) == taken


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_forcing_all_modules_equals_fp32_bit_for_bit(checkpointing: bool, compiled: bool) -> None:
    fp32 = step(small_vit(), amp=False)
    assert not step(small_vit()).equals(fp32)
    model = small_vit(checkpointing=checkpointing)
    force_fp32(model, ALL, "cpu")
    assert step(model, aot(model) if compiled else None).equals(fp32)


@pytest.mark.slow
def test_compiled_model_can_force_more_modules_during_training() -> None:
    model = small_vit()
    forward = aot(model)
    assert step(model, forward).equals(step(small_vit()))
    assert force_fp32(model, ["blocks.1.mlp"], "cpu") == ["blocks.1.mlp"]
    assert force_fp32(model, ["blocks.1.mlp"], "cpu") == []
    assert force_fp32(model, ["blocks.1.mlp.fc1"], "cpu") == []
    eager = small_vit()
    force_fp32(eager, ["blocks.1.mlp"], "cpu")
    assert step(model, forward).equals(step(eager))
    assert force_fp32(model, ["blocks", "blocks.1.mlp.fc1"], "cpu") == ["blocks.0", "blocks.1"]
    force_fp32(model, ALL, "cpu")
    assert step(model, forward).equals(step(small_vit(), amp=False))


def test_deep_copy_is_forced_and_uses_its_own_weights_and_forward() -> None:
    model = small_vit().eval()
    model.head.forward = MethodType(lambda head, tokens: nn.Linear.forward(head, tokens).abs(), model.head)
    force_fp32(model, ["head"], "cpu")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
    assert forced_modules(twin) == ["head"]
    assert output_dtypes(twin)["head"] is torch.float32
    assert twin(batch()[0]).min() > 0
    assert model(batch()[0]).abs().sum() == 0


def test_keyword_and_nested_inputs_are_cast() -> None:
    class Pair(nn.Module):
        def forward(self, both: list[torch.Tensor], *, scale: torch.Tensor, count: torch.Tensor) -> tuple[Any, ...]:
            return both[0].dtype, both[1].dtype, scale.dtype, count.dtype

    model = nn.ModuleDict({"pair": Pair()})
    force_fp32(model, ["pair"], "cpu")
    half = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        seen = model["pair"]([half, half], scale=half.half(), count=torch.ones(2, dtype=torch.int64))
    assert seen == (torch.float32,) * 3 + (torch.int64,)


# ---- fp8


def linears(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_fp8_converts_suitable_layers_and_logs_the_others(tiny: Path, said: pytest.LogCaptureFixture) -> None:
    words = {**MODES["fp8"], "MODEL__EMBED_DIM": 16, "MODEL__MLP_RATIO": 1.5}
    ready = build(tiny, **words)
    fitting = dict.fromkeys(["blocks.0.attn.qkv", "blocks.0.attn.proj"], "Float8Linear")
    others = dict.fromkeys(["blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"], "Linear")
    assert linears(ready.model) == {**fitting, **others}
    (warning,) = [r.getMessage() for r in said.records if (r.name, r.levelno) == (log.name, logging.WARNING)]
    assert "EMULATED" in warning
    (left,) = [r.getMessage() for r in said.records if "left in bf16" in r.getMessage()]
    assert left.endswith(": blocks.0.mlp.fc1, blocks.0.mlp.fc2, head")
    qkv: Any = ready.model.get_submodule("blocks.0.attn.qkv")
    assert qkv.config.emulate
    assert list(ready.model.state_dict()) == list(build(tiny).model.state_dict())


def test_fp8_is_coarser_than_bf16_and_close_to_it(tiny: Path) -> None:
    changes = {}
    for name, words in (("fp32", {}), ("bf16", MODES["O1 bf16"]), ("fp8", MODES["fp8"])):
        ready = build(tiny, **words, **PLAIN_STEPS)
        changes[name] = change(ready, next(windows(ready)))
    exact = changes["fp32"]
    error = {name: ((stepped - exact).norm() / exact.norm()).item() for name, stepped in changes.items()}
    assert 3 * error["bf16"] < error["fp8"] < 0.3


def test_fp8_supports_any_number_of_tokens_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated products take all sizes; those of a GPU, of which torch knows the rules, only multiples of 16."""
    monkeypatch.setattr(low_precision, "hardware_has_fp8", lambda _: True)
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 64, bias=False, device="cuda", dtype=torch.bfloat16))
        low_precision.convert_to_fp8(model, torch.device("cuda"))
        images = torch.empty(8, 197, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        node: Any = model(images).grad_fn
        while "matmul_with_hp" not in type(node).__name__:
            node = node.next_functions[0][0]
        # The node alone: torch's engine would start a thread for a GPU that is not there.
        _, of_weight, *_ = node.apply(torch.empty(8, 197, 64, device="cuda", dtype=torch.bfloat16))
        assert of_weight.shape == (32, 64)


def test_fp32_modules_and_both_classifiers_are_not_converted_to_fp8() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, num_classes=16, img_size=32)
    settings = amp(DTYPE="fp8", FP32_MODULES=("blocks.0.mlp",))
    low_precision.prepare_model(model, settings, Precision(settings, torch.device("cpu")))
    kept = {name for name, kind in linears(model).items() if kind == "Linear"}
    assert kept == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head", "head_dist"}


def test_fp8_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"fp8 needs torchao.*pip install torchao"):
        check_amp(amp(DTYPE="fp8"), TrainConfig())
    check_amp(AmpConfig(DTYPE="fp8"), TrainConfig())  # AMP is off


# ---- weights that autocast always casts, so that FSDP may gather them in half precision


def names_of(model: nn.Module, *black_list: str) -> set[str]:
    cast = {id(weight) for weight in cast_weights(model, black_list)}
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in cast}


def test_only_linear_layers_and_convolutions_of_a_vit_are_cast() -> None:
    sizes: dict[str, Any] = {"depth": 1, "embed_dim": 12, "num_heads": 1, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, init_values=1e-5, reg_tokens=2, qk_norm=True)
    layers = {
        "patch_embed.proj",
        "head",
        *(f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    }
    assert names_of(model) == {f"{layer}.{own}" for layer in layers for own in ("weight", "bias")}
    without_linear = {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert names_of(model, "fc") == without_linear, "Paddle's name of linear"
    assert names_of(model, "linear", "conv2d") == set()
    LinearPatches().apply(built_of(model), True)
    assert names_of(model) >= without_linear
    assert names_of(model, "fc") == set()
    force_fp32(model, ["blocks.0", "head"], "cpu")
    assert names_of(model) == without_linear


def test_weights_with_another_use_are_not_cast() -> None:
    """Their other use is in fp32, and would be of rounded weights."""
    model = nn.ModuleDict(
        {
            "standardised": StdConv2d(2, 2, 1),
            "normalised": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "formerly": nn.utils.weight_norm(nn.Linear(2, 2, bias=False)),
            "embedding": nn.Embedding(2, 2),
            "tied": nn.Linear(2, 2),
        }
    )
    model["tied"].weight = model["embedding"].weight  # pyright: ignore[reportArgumentType]
    assert names_of(model) == {"tied.bias"}
