"""When an update is skipped, the log names what overflowed. The replay that finds it leaves no trace, and is rare."""

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

from datasets import Batch, MicroBatch
from engine.amp import overflow
from engine.amp.overflow import Blame, OverflowWatch
from engine.amp.precision import Precision
from tests.engine.small import CPU, FP16, parts_of
from tests.engine.test_no_host_copies import Listener
from utils.seeding import seed_all

SAMPLES = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def vit() -> Any:
    """Small enough for a CPU that computes fp16 slowly."""
    torch.manual_seed(0)
    return VisionTransformer(img_size=8, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=10)


def micro_batch(number: int = 0, images: Tensor | None = None) -> tuple[MicroBatch, Batch]:
    generator = torch.Generator().manual_seed(number)
    if images is None:
        images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    indices = torch.arange(SAMPLES) + 100 * (number + 1)
    return MicroBatch(number, indices.numpy(), 1.0), Batch(images, torch.arange(SAMPLES), indices)


def watch_of(model: nn.Module) -> OverflowWatch:
    watch = OverflowWatch(7, Precision(FP16, CPU))
    watch.attach(parts_of(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), criterion=F.cross_entropy))
    return watch


def hold(watch: OverflowWatch, update: int, *micro_batches: tuple[MicroBatch, Batch], scale: float = 1.0) -> None:
    """An update, up to the step of the optimiser."""
    for one in micro_batches:
        watch.after_backward(*one)
    watch._precision.scale_tensor = lambda: torch.tensor(scale)
    watch.before_step(update)


def blame_of(model: nn.Module, *micro_batches: tuple[MicroBatch, Batch], scale: float = 1.0) -> Blame:
    watch = watch_of(model)
    hold(watch, 1, *(micro_batches or [micro_batch()]), scale=scale)
    watch.after_update(1, False)
    (blame,) = watch.take()
    return blame


def with_huge_bias() -> Any:
    model = vit()
    nn.init.constant_(model.blocks[2].mlp.fc1.bias, 7e4)
    return model


class Forward(nn.Module):
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


def test_parameter_that_does_not_fit_fp16_is_named() -> None:
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


@pytest.mark.parametrize(("fused", "operation"), [(True, "scaled_dot_product_attention"), (False, "matmul")])
def test_overflow_in_attentions_backward_pass_is_named(fused: bool, operation: str) -> None:
    model = vit()
    attention = model.blocks[1].attn
    attention.fused_attn = fused
    with torch.no_grad():  # logits as before, but a huge gradient of the queries
        attention.qkv.weight[:32] /= 3000
        attention.qkv.weight[32:64] *= 3000
        attention.qkv.weight[64:] *= 100
    blame = blame_of(model, scale=2.0**15)
    assert (blame.operation, blame.module, blame.direction) == (operation, "blocks.1.attn", "backward")


def test_scale_that_is_too_large_is_reported_for_the_loss() -> None:
    blame = blame_of(vit(), scale=2.0**26)
    assert (blame.module, blame.direction, blame.dtype) == ("loss", "backward", "fp16")
    assert "the loss scale is too large" in blame.words()
    blame = blame_of(vit(), scale=3e38)
    assert (blame.operation, blame.module) == ("scaling", "loss")
    assert "the scaled loss itself" in blame.words()


def test_overflow_in_a_gradient_names_its_module() -> None:
    """A ViT is full of modules that hand their input on; they must not lead astray."""
    model = vit()
    model.blocks[1].mlp.drop1 = Forward(BadGradient.apply)
    assert isinstance(model.blocks[2].drop_path1, nn.Identity)
    blame = blame_of(model)
    assert (blame.module, blame.direction) == ("blocks.1.mlp.drop1", "backward")
    model.blocks[1].mlp = Parent(nn.Linear(32, 32))
    assert blame_of(model).module == "blocks.1.mlp", "a parent's own operation"


def test_bad_samples_are_named() -> None:
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


def test_harmless_infinity_is_not_reported() -> None:
    model = vit()
    model.blocks[0].norm1 = Forward(lambda x: x + (x - x).detach().log().nan_to_num(neginf=0.0))
    assert blame_of(model).operation == ""
    assert blame_of(model, scale=2.0**26).module == "loss"


@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_of_either_sign_is_found_where_it_arises(sign: int) -> None:
    model = vit()
    nn.init.constant_(model.blocks[2].mlp.fc1.bias, sign * 7e4)
    assert blame_of(model).parameter == "blocks.2.mlp.fc1.bias"
    model = vit()
    model.blocks[1].norm1 = Forward(lambda x: (x.float().abs() + 1) * 1e38 * (sign * 1e38))
    assert blame_of(model).module == "blocks.1.norm1"
    model.blocks[1].norm1 = Forward(lambda x: (x.float() * 1e10).half())
    assert blame_of(model).module == "blocks.1.norm1"


MASK = torch.ones(5, 5, dtype=torch.bool).tril()


@torch.library.custom_op("vitamp_tests::attention", mutates_args=())
def attention(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.full_like(x, torch.inf)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=MASK)[:, 0],
        lambda x: attention(x.detach())[0],
    ],
    ids=["a mask of minus infinity", "padding of attention's logsumexp"],
)
def test_infinity_that_belongs_there_is_not_reported(call: Callable[..., Tensor]) -> None:
    model = with_huge_bias()
    model.blocks[0].norm1 = Forward(call)
    assert blame_of(model).module == "blocks.2.mlp.fc1"


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_model_is_replayed_in_eager_mode(in_place: bool) -> None:
    model = with_huge_bias()
    trained: Any = model
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    else:
        trained = torch.compile(model, backend="eager", fullgraph=True)
    _, batch = micro_batch()
    with torch.autocast("cpu", torch.float16):
        assert not trained(batch.images).isfinite().all()
    blame = blame_of(model)
    assert (blame.operation, blame.module) == ("linear", "blocks.2.mlp.fc1")


# ---- the replay leaves no trace


def state(model: nn.Module) -> dict[str, Any]:
    """Weights, buffers and gradients."""
    return {**model.state_dict(keep_vars=True), **{f"{name}.grad": p.grad for name, p in model.named_parameters()}}


def test_replay_has_no_side_effects() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 10))
    model[4].eval()
    nn.init.constant_(model.get_parameter("4.bias"), 7e4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _: pytest.fail("others wait for this gradient"))
    tensors = {name: (value, value.clone()) for name, value in state(model).items()}
    modes = [module.training for module in model.modules()]
    hooks = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    seed_all(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    seed_all(3)

    assert blame_of(model).module == "4"

    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    now = state(model)
    for name, (value, before) in tensors.items():
        assert now[name] is value
        assert torch.equal(value, before)
    assert [module.training for module in model.modules()] == modes
    assert (len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)) == hooks
    assert not torch.is_autocast_enabled("cpu")


def test_replay_draws_the_random_numbers_of_the_update() -> None:
    drawn: list[Tensor] = []
    model = nn.Sequential(Forward(lambda x: (drawn.append(torch.rand(3)), x)[1]), nn.Flatten(), nn.Linear(192, 10))
    watch = watch_of(model)
    hold(watch, 5, micro_batch(0), micro_batch(1))
    watch.after_update(5, False)
    for number in (0, 1):
        seed_all(7, "micro", 5, number)
        assert torch.equal(drawn[number], torch.rand(3))


def test_failing_replay_does_not_end_the_run() -> None:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nwith much more to say")

    model = vit()
    model.blocks[1].mlp.drop1 = Forward(fail)
    blame = blame_of(model)
    assert blame.operation == ""
    assert "the replay failed (out of memory)" in blame.words()
    assert not nn.modules.module._global_forward_hooks


def test_normal_update_costs_one_copy_of_the_scale() -> None:
    watch, scale = watch_of(Forward(lambda _: pytest.fail("a forward pass"))), torch.tensor(2.0)
    watch._precision.scale_tensor = lambda: scale
    share, batch = micro_batch()
    held = weakref.ref(batch.images)
    with Listener() as listener:
        watch.after_backward(share, batch)
        watch.before_step(1)
        watch.after_update(1, True)
        assert watch.take() == []
    assert listener.names == {"aten::clone", "aten::detach"}
    del batch
    assert held() is None


# ---- it is rare


def test_replays_are_limited() -> None:
    watch = watch_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    for update in range(1, 121):
        hold(watch, update, micro_batch())
        watch.after_update(update, update == 2)
    found = [(blame.update, blame.passed_over) for blame in watch.take()]
    assert found == [(1, 0), (3, 0), (4, 0), (54, 49), (104, 49)]


# ---- skips known late


class Late:
    """Answers that arrive when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overflow, "send_to_host", self)
        self.flags: list[Tensor] = []
        self.arrived = 0

    def __call__(self, stepped: Tensor) -> Callable[[], bool | None]:
        number = len(self.flags)
        self.flags.append(stepped.clone())
        return lambda: bool(self.flags[number]) if number < self.arrived else None


def test_late_skip_is_replayed_with_its_own_batch_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    watch, scale = watch_of(with_huge_bias()), torch.tensor(64.0)
    watch._precision.scale_tensor = lambda: scale
    for update, stepped in ((1, True), (2, False), (3, True)):
        watch.after_backward(*micro_batch(update))
        watch.before_step(update)
        scale *= 0.5  # as the scaler does, in place
        watch.after_update(update, torch.tensor([stepped]))
        assert watch.take() == []
    late.arrived = 2
    (blame,) = watch.take()
    assert (blame.update, blame.noticed_at, blame.scale) == (2, 3, 32.0)
    assert blame.sample_indices == (300, 301, 302, 303)
    assert "noticed 1 update later" in blame.words()
    assert watch.take() == []


def test_memory_of_pending_updates_is_limited(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    """Two updates of two micro-batches fit; the newest two keep their images."""
    size = micro_batch(0)[1].images.nbytes
    monkeypatch.setattr(overflow, "MAX_BYTES", 4 * size)
    late = Late(monkeypatch)
    watch = watch_of(with_huge_bias())
    images = []
    for update in range(1, 5):
        batches = [micro_batch(2 * update + nth) for nth in (0, 1)]
        images.append(weakref.ref(batches[0][1].images))
        hold(watch, update, *batches)
        del batches
        watch.after_update(update, torch.tensor([False]))
    assert [image() is None for image in images] == [True, True, False, False]
    late.arrived = 4
    assert [(blame.update, blame.passed_over) for blame in watch.take()] == [(3, 2), (4, 0)]
    assert [line for line in said.messages if "cannot be replayed" in line] == [said.messages[0]]
    assert said.messages[0].startswith("update 1 was skipped and cannot be replayed: the images of recent updates ")


def test_update_larger_than_the_limit_is_dropped_while_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overflow, "MAX_BYTES", 2 * micro_batch(0)[1].images.nbytes)
    watch = watch_of(with_huge_bias())
    for update in (1, 2):
        images = []
        for nth in range(5):
            share, batch = micro_batch(nth)
            images.append(weakref.ref(batch.images))
            watch.after_backward(share, batch)
            del batch
        assert all(image() is None for image in images[:-1])
        watch.before_step(update)
        watch.after_update(update, False)
    assert watch.take() == []
    assert sum("cannot be replayed" in line for line in said.messages) == 1
