"""When an update is skipped, the log names what overflowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.amp.overflowing import Forward, blame_of, half, micro_batch, vit, with_huge_bias

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_overflow_in_a_parents_own_operation_names_the_parent() -> None:
    model = vit()
    model.blocks[1].mlp = Parent(nn.Linear(32, 32))
    assert blame_of(model).module == "blocks.1.mlp"


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


def test_mask_of_minus_infinity_is_not_reported() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    model = with_huge_bias()
    model.blocks[0].norm1 = Forward(lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=mask)[:, 0])
    assert blame_of(model).module == "blocks.2.mlp.fc1"


@torch.library.custom_op("vitamp_tests::attention", mutates_args=())
def attention(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.full_like(x, torch.inf)


def test_padding_of_attentions_logsumexp_is_not_reported() -> None:
    model = with_huge_bias()
    model.blocks[0].norm1 = Forward(lambda x: attention(x.detach())[0])
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
    with half():
        assert not trained(batch.images).isfinite().all()
    blame = blame_of(model)
    assert (blame.operation, blame.module) == ("linear", "blocks.2.mlp.fc1")
