"""When an update is skipped, the log names what overflowed, and the replay that finds it out leaves no trace."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from datasets import Batch, Share
from engine import overflow
from engine.overflow import Blame, OverflowWatch
from utils.seeding import seed_all

CPU = torch.device("cpu")
SAMPLES = 4


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vit() -> Any:
    """Small enough for a CPU that computes fp16 slowly."""
    torch.manual_seed(0)
    return VisionTransformer(img_size=8, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=10)


def micro_batch(number: int = 0, images: Tensor | None = None) -> tuple[Share, Batch]:
    generator = torch.Generator().manual_seed(number)
    if images is None:
        images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    indices = torch.arange(SAMPLES) + 100 * (number + 1)
    return Share(number, indices.numpy(), 1.0), Batch(images, torch.arange(SAMPLES), indices)


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def watch_of(model: nn.Module, **options: Any) -> OverflowWatch:
    return OverflowWatch(model, nn.Identity(), F.cross_entropy, half, seed=7, device=CPU, **options)


def blame_of(model: nn.Module, *micro_batches: tuple[Share, Batch], scale: float = 1.0) -> Blame:
    watch = watch_of(model)
    watch.keep(1, list(micro_batches) or [micro_batch()], torch.tensor(scale))
    watch.after(1, False)
    (blame,) = watch.take()
    return blame


def with_huge_bias() -> Any:
    model = vit()
    nn.init.constant_(model.blocks[2].mlp.fc1.bias, 7e4)
    return model


class Forward(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Any:
        across = BadGradient.apply(self.child(x.transpose(0, 1)))
        return across.transpose(0, 1)  # pyright: ignore[reportOptionalMemberAccess]


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].mul(float("inf"))


# ---- what is named


def test_a_huge_bias_is_named_with_its_linear_layer() -> None:
    blame = blame_of(with_huge_bias(), scale=2.0)
    assert (blame.operation, blame.module, blame.direction) == ("linear", "blocks.2.mlp.fc1", "forward")
    assert (blame.parameter, blame.dtype, blame.scale) == ("blocks.2.mlp.fc1.bias", "fp16", 2.0)
    assert blame.sample_indices == blame.bad_samples == (100, 101, 102, 103)
    line = blame.words()
    assert "linear in blocks.2.mlp.fc1 (forward" in line
    assert "blocks.2.mlp.fc1.bias does not fit fp16" in line
    assert "100, 101, 102, 103" in line
    assert "loss scale 2" in line
    assert "later" not in line


def test_a_huge_product_of_queries_and_keys_is_named_with_its_attention() -> None:
    model = vit()
    attention = model.blocks[1].attn
    attention.fused_attn = False
    with torch.no_grad():
        attention.qkv.weight[:64] *= 3000
    blame = blame_of(model)
    assert (blame.operation, blame.module, blame.direction) == ("matmul", "blocks.1.attn", "forward")


@pytest.mark.parametrize(("fused", "operation"), [(True, "scaled_dot_product_attention"), (False, "matmul")])
def test_attention_that_overflows_backward_is_named_fused_or_not(fused: bool, operation: str) -> None:
    model = vit()
    attention = model.blocks[1].attn
    attention.fused_attn = fused
    with torch.no_grad():  # logits as before, but a huge gradient of the queries
        attention.qkv.weight[:32] /= 3000
        attention.qkv.weight[32:64] *= 3000
        attention.qkv.weight[64:] *= 100
    blame = blame_of(model, scale=2.0**15)
    assert (blame.operation, blame.module, blame.direction) == (operation, "blocks.1.attn", "backward")


def test_a_scale_far_too_large_is_blamed_on_the_loss() -> None:
    blame = blame_of(vit(), scale=2.0**26)
    assert (blame.module, blame.direction, blame.dtype) == ("loss", "backward", "fp16")
    assert "the scale is too large" in blame.words()
    blame = blame_of(vit(), scale=3e38)
    assert (blame.operation, blame.module) == ("scaling", "loss")
    assert "the scaled loss itself" in blame.words()


def test_a_gradient_is_blamed_on_the_module_it_broke_in() -> None:
    """A ViT is full of modules that hand their input on; they must not lead astray."""
    model = vit()
    model.blocks[1].mlp.drop1 = Forward(BadGradient.apply)
    assert isinstance(model.blocks[2].drop_path1, nn.Identity)
    blame = blame_of(model)
    assert (blame.module, blame.direction) == ("blocks.1.mlp.drop1", "backward")


def test_checkpointing_does_not_lead_astray() -> None:
    model = vit()
    model.set_grad_checkpointing(True)
    model.blocks[1].attn.proj_drop = Forward(BadGradient.apply)
    assert blame_of(model).module == "blocks.1.attn.proj_drop"


def test_a_gradient_is_blamed_on_the_parent_where_it_broke_behind_a_child() -> None:
    model = vit()
    model.blocks[1].mlp = Parent(nn.Linear(32, 32))
    assert blame_of(model).module == "blocks.1.mlp"


def test_one_bad_sample_is_told_from_the_others() -> None:
    share, batch = micro_batch()
    batch.images[2, 0, 0, 0] = float("nan")
    blame = blame_of(vit(), (share, batch))
    assert (blame.module, blame.bad_samples) == ("batch", (102,))
    assert "the images were not finite" in blame.words()
    batch.images[2, 0, 0, 0] = 1e6
    blame = blame_of(vit(), (share, batch))
    assert (blame.operation, blame.module, blame.bad_samples) == ("conv2d", "patch_embed.proj", (102,))
    assert "in 1 of 4 samples: 102" in blame.words()


def test_the_micro_batch_that_overflowed_is_named() -> None:
    share, batch = micro_batch(1)
    batch.images[0] = 1e6
    blame = blame_of(vit(), micro_batch(0), (share, batch), micro_batch(2))
    assert blame.sample_indices == (200, 201, 202, 203)
    assert blame.bad_samples == (200,)


def test_an_infinity_that_harms_nothing_is_not_blamed() -> None:
    model = vit()
    model.blocks[0].norm1 = Forward(lambda x: x + (x - x).detach().log().nan_to_num(neginf=0.0))
    assert blame_of(model).operation == ""
    assert blame_of(model, scale=2.0**26).module == "loss"


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_of_either_sign_is_found_where_it_arises(sign: int) -> None:
    model = vit()
    nn.init.constant_(model.blocks[2].mlp.fc1.bias, sign * 7e4)
    assert blame_of(model).parameter == "blocks.2.mlp.fc1.bias"
    model = vit()
    model.blocks[1].norm1 = Forward(lambda x: (x.float().abs() + 1) * 1e38 * (sign * 1e38))
    assert blame_of(model).module == "blocks.1.norm1"
    model.blocks[1].norm1 = Forward(lambda x: (x.float() * 1e10).half())
    assert blame_of(model).module == "blocks.1.norm1"


def test_a_mask_is_not_blamed_for_what_overflows_behind_it() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    model = with_huge_bias()
    model.blocks[0].norm1 = Forward(lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=mask)[:, 0])
    assert blame_of(model).module == "blocks.2.mlp.fc1"


@torch.library.custom_op("vitamp_tests::attention", mutates_args=())
def attention(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.full_like(x, torch.inf)


def test_what_attention_keeps_for_the_way_back_is_not_blamed() -> None:
    model = with_huge_bias()
    model.blocks[0].norm1 = Forward(lambda x: attention(x.detach())[0])
    assert blame_of(model).module == "blocks.2.mlp.fc1"


def test_nothing_is_made_up_where_the_replay_finds_nothing() -> None:
    blame = blame_of(vit(), micro_batch(0), micro_batch(1), scale=8.0)
    assert (blame.operation, blame.module) == ("", "")
    assert "not seen again in the replay" in blame.words()
    assert "overflowed only in their sum" in blame.words()
    assert len(blame.sample_indices) == 2 * SAMPLES


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_replayed_as_it_is_written(in_place: bool) -> None:
    model = with_huge_bias()
    trained: Any = model
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    else:
        trained = torch.compile(model, backend="eager", fullgraph=True)
    _, batch = micro_batch()
    with half():
        assert not trained(batch.images).isfinite().all()
    blame = blame_of(model)
    assert (blame.operation, blame.module) == ("linear", "blocks.2.mlp.fc1")


def test_long_rows_of_samples_are_cut_short_in_the_log_only() -> None:
    indices = tuple(range(1000, 1256))
    blame = Blame(3, 3, "linear", "head", "backward", "fp16", indices, 4.0, kernel="aten::mm")
    assert "1007, ..." in blame.words()
    assert "1008" not in blame.words()


# ---- no trace


def test_the_replay_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 10))
    model[4].eval()
    nn.init.constant_(model.get_parameter("4.bias"), 7e4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _: pytest.fail("others wait for this gradient"))
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    tensors = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    hooks = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)

    assert blame_of(model).module == "4"

    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    for name, (gradient, before) in gradients.items():
        assert model.get_parameter(name).grad is gradient
        assert torch.equal(gradient, before)
    now = model.state_dict(keep_vars=True)
    for name, (value, before) in tensors.items():
        assert now[name] is value
        assert torch.equal(value, before)
    assert [module.training for module in model.modules()] == modes
    assert (len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)) == hooks
    assert not torch.is_autocast_enabled("cpu")


def test_the_replay_draws_the_update_s_random_numbers() -> None:
    drawn: list[Tensor] = []
    model = nn.Sequential(Forward(lambda x: (drawn.append(torch.rand(3)), x)[1]), nn.Flatten(), nn.Linear(192, 10))
    watch = watch_of(model)
    watch.keep(5, [micro_batch(0), micro_batch(1)], torch.tensor(1.0))
    watch.after(5, False)
    for number in (0, 1):
        seed_all(7, "micro", 5, number)
        assert torch.equal(drawn[number], torch.rand(3))


def test_a_replay_that_fails_does_not_end_the_run() -> None:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nwith much more to say")

    model = vit()
    model.blocks[1].mlp.drop1 = Forward(fail)
    blame = blame_of(model)
    assert blame.operation == ""
    assert "the replay failed (out of memory)" in blame.words()
    assert not nn.modules.module._global_forward_hooks


class Counted(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_normal_update_costs_one_copy_of_the_scale() -> None:
    watch, scale = watch_of(Forward(lambda _: pytest.fail("a forward pass"))), torch.tensor(2.0)
    micro_batches = [micro_batch()]
    held = weakref.ref(micro_batches[0][1].images)
    with Counted() as counted:
        watch.keep(1, micro_batches, scale)
        watch.after(1, True)
        assert watch.take() == []
    assert sorted(set(counted.names)) == ["aten::clone", "aten::detach"]
    del micro_batches
    assert held() is None


# ---- how often


def test_replays_are_few() -> None:
    watch = watch_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    for update in range(1, 121):
        watch.keep(update, [micro_batch()], torch.tensor(1.0))
        watch.after(update, update == 2)
    found = [(blame.update, blame.passed_over) for blame in watch.take()]
    assert found == [(1, 0), (3, 0), (4, 0), (54, 49), (104, 49)]


# ---- known late


class Late:
    """Answers that arrive when the test says so."""

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self.arrived = 0

    def __call__(self, moved: Tensor) -> Callable[[], bool | None]:
        number = len(self.flags)
        self.flags.append(moved.clone())
        return lambda: bool(self.flags[number]) if number < self.arrived else None


def test_a_skip_known_late_is_replayed_with_its_own_batch_and_scale() -> None:
    late = Late()
    watch, scale = watch_of(with_huge_bias(), send=late), torch.tensor(64.0)
    for update, moved in ((1, True), (2, False), (3, True)):
        watch.keep(update, [micro_batch(update)], scale)
        scale *= 0.5  # as the scaler does, in place
        watch.after(update, torch.tensor([moved]))
        assert watch.take() == []
    late.arrived = 2
    (blame,) = watch.take()
    assert (blame.update, blame.noticed_at, blame.scale) == (2, 3, 32.0)
    assert blame.sample_indices == (300, 301, 302, 303)
    assert "noticed 1 update later" in blame.words()
    assert watch.take() == []


def test_what_waits_for_a_late_answer_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "KEPT_BYTES", 0)
    late = Late()
    watch = watch_of(with_huge_bias(), send=late)
    images = []
    for update in range(1, 5):
        kept = micro_batch(update)
        images.append(weakref.ref(kept[1].images))
        watch.keep(update, [kept], torch.tensor(1.0))
        del kept
        watch.after(update, torch.tensor([False]))
    assert [image() is None for image in images] == [True, True, False, False]
    late.arrived = 4
    assert [(blame.update, blame.passed_over) for blame in watch.take()] == [(3, 2), (4, 0)]
