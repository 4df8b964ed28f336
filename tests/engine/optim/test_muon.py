"""Muon: which parameters it updates, and that an update is what its formula says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.optim.build import build_optimizer
from engine.optim.muon import matrices_of
from tests.engine.small import CPU
from utils.config import MuonConfig, OptimizerConfig, TrainConfig
from utils.errors import UserError

MATRICES = {f"blocks.{n}.{layer}.weight": 3 if layer == "qkv" else 1 for n in (0, 1) for layer in ("qkv", "fc1", "fc2")}
EVERY_MATRIX = {**MATRICES, "patch_embed.weight": 1, "head.weight": 1}


class Block(nn.Module):
    """Every kind of parameter that a block has."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.table = nn.Parameter(torch.randn(5, 2))
        self.gate = nn.Linear(width, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 2)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 10)

    def get_classifier(self) -> nn.Module:
        return self.head


def optimizer_of(model: nn.Module, amp: bool = False, name: str = "Muon", **settings: Any) -> torch.optim.Optimizer:
    muon = MuonConfig(**settings.pop("MUON", {}))
    train_config = TrainConfig(OPTIMIZER=OptimizerConfig(NAME=name, MUON=muon), **settings)
    return build_optimizer(model, train_config, train_config.BASE_LR, CPU, amp)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_linear_layers_in_blocks_are_muons() -> None:
    assert matrices_of(Model()) == MATRICES
    assert matrices_of(Model(), every=True) == EVERY_MATRIX
    depthwise = nn.Conv2d(8, 8, 3, groups=8)
    assert matrices_of(nn.Sequential(nn.Linear(8, 8), depthwise), every=True) == {"0.weight": 1}


def test_qkv_that_is_ordered_by_heads_is_one_matrix() -> None:
    """timm's MaxViT keeps q, k and v of a head together."""
    model = Model()
    for block in model.blocks:
        block.head_first = True  # pyright: ignore[reportArgumentType]
    assert matrices_of(model)["blocks.0.qkv.weight"] == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_model_without_a_matrix_to_train_is_an_error(frozen: bool) -> None:
    model = Model() if frozen else nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    if frozen:
        model.blocks.requires_grad_(False)
    with pytest.raises(UserError, match=r"Muon finds no matrix to train in .*Use AdamW"):
        optimizer_of(model)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps, as their author writes them."""
    x = matrix / matrix.norm()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Reference:
    """Both optimisers in fp64, one matrix at a time."""

    def __init__(self, model: nn.Module, matrices: dict[str, int]) -> None:
        self.matrices = matrices
        self.weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
        self.updates = 0
        self.first, self.second = ({n: torch.zeros_like(w) for n, w in self.weights.items()} for _ in range(2))

    def step(self, model: nn.Module, rate: float, decay: float) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            weight, gradient, number = self.weights[name], parameter.grad.double(), self.matrices.get(name, 0)
            decayed = decay if weight.ndim > 1 else 0.0
            if number:
                self.first[name] = 0.95 * self.first[name] + 0.05 * gradient
                ahead = 0.95 * self.first[name] + 0.05 * gradient
                rows = ahead.flatten(1).chunk(number)
                parts = [orthogonalised(part) * 0.2 * max(part.shape) ** 0.5 for part in rows]
                change = torch.cat(parts).view(weight.shape)
            else:
                self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
                self.second[name] = 0.999 * self.second[name] + 0.001 * gradient**2
                mean = self.first[name] / (1 - 0.9**self.updates)
                change = mean / ((self.second[name] / (1 - 0.999**self.updates)).sqrt() + 1e-8)
            self.weights[name] = weight * (1 - rate * decayed) - rate * change


@pytest.mark.parametrize(
    ("amp", "every", "tolerance"), [(False, False, 5e-7), (False, True, 5e-7), (True, False, 2e-3)]
)
def test_updates_equal_a_reference_in_fp64(amp: bool, every: bool, tolerance: float) -> None:
    """To the rounding of fp32 weights of about 1, four times; in bf16 the steps only approximate the reference."""
    torch.manual_seed(0)
    model = Model()
    if every:  # the order of a convolution's weights in memory is another
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = optimizer_of(model, amp, MUON={"EVERY_MATRIX": every}, BASE_LR=1e-2, WEIGHT_DECAY=0.1)
    reference = Reference(model, EVERY_MATRIX if every else MATRICES)
    for update in range(4):
        set_gradients(model, seed=update)
        optimizer.step()
        reference.step(model, 1e-2, 0.1)
    for name, weight in model.named_parameters():
        error = (weight.detach().double() - reference.weights[name]).abs().max().item()
        assert error < tolerance, (name, error)


def test_timms_relatives_of_muon_get_the_same_groups() -> None:
    model = Model()
    optimizer = optimizer_of(model, name="NAdaMuon")
    set_gradients(model, 0)
    optimizer.step()
    muons = {name for name, weight in model.named_parameters() if optimizer.state[weight]["use_muon"]}
    assert muons == set(matrices_of(model))
    assert {group["ns_steps"] for group in optimizer.param_groups} == {5}
