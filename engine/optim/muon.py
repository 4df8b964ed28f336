"""Muon: orthogonalised momentum for the hidden matrices of the blocks, AdamW for all other parameters.

Its author (https://kellerjordan.github.io/posts/muon) excludes embeddings and the classifier, and orthogonalises q, k
and v one by one. timm's Muon takes every matrix, and a fused qkv as one. TRAIN.OPTIMIZER.MUON.EVERY_MATRIX takes every
matrix, and q, k and v one by one.
"""

# torch's own optimisers use torch._foreach_*; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from timm.optim.muon import zeropower_via_newtonschulz
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from engine.amp.precision import dtype_name
from models.parts import blocks_of, classifiers, is_inside
from utils.errors import UserError
from utils.text import counted
from vitamp.tensors import parts_of

MATRICES = "matrices"
"""Key of a parameter group: number of matrices in each of its weights, 3 for a fused qkv; 0: AdamW updates it."""
COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]
"""The author's, repeated at each step: unlike timm's default, they suit any number of steps."""
NS_STEPS = 5
MOMENTUM = 0.95
USES_MUON = "use_muon"
"""Key of a group of Muon and its relatives, as timm reads it: false if AdamW updates the group's parameters."""


def matrices_of(model: nn.Module, every: bool = False) -> dict[str, int]:
    """Return the names of the weights that Muon updates, each with the number of matrices in it.

    These are the linear layers in blocks. UserError if none of them trains.
    `every`: also linear layers elsewhere, and convolutions that mix all channels, as matrices with a row per output.
    """
    blocks = [name for name, _ in blocks_of(model)]
    heads = classifiers(model)
    modules = dict(model.named_modules())

    def is_chosen(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.Linear):
            return every or (is_inside(name, blocks) and not is_inside(name, heads))
        return every and isinstance(module, nn.Conv2d) and module.groups == 1

    def count_matrices(name: str, layer: nn.Module) -> int:
        """Return 3 for a fused qkv, which its name shows; 1 for other layers."""
        parts = len(parts_of(name)) if isinstance(layer, nn.Linear) else 1
        # timm's attention with `head_first` keeps the rows of q, k and v of a head together. A third of all rows is
        # then not q, so the weight counts as one matrix.
        parent_name, _, _ = name.rpartition(".")
        is_by_head = getattr(modules[parent_name], "head_first", False)
        rows = cast(Tensor, layer.weight).shape[0]
        can_split = not is_by_head and rows % parts == 0
        return parts if can_split else 1

    matrices: dict[str, int] = {}
    for name, module in modules.items():
        if is_chosen(name, module):
            is_vector = min(cast(Tensor, module.weight).flatten(1).shape) <= 1  # without directions to orthogonalise
            if not is_vector:
                matrices[f"{name}.weight"] = count_matrices(name, module)
    if not any(model.get_parameter(name).requires_grad for name in matrices):
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME: Muon finds no matrix to train in {type(model).__name__}: it updates only the "
            "linear layers of blocks, and there are none, or all are frozen (MODEL.FREEZE). Use AdamW."
        )
    return matrices


def describe_muon(optimizer: Optimizer) -> str:
    """Describe for the banner how many parameters Muon updates, and how many AdamW."""

    def size(groups: Sequence[dict[str, Any]]) -> str:
        weights = list(chain.from_iterable(group["params"] for group in groups))
        return f"{counted(len(weights), 'tensor')} ({sum(w.numel() for w in weights):,} parameters)"

    muon = [group for group in optimizer.param_groups if group[USES_MUON]]
    others = [group for group in optimizer.param_groups if not group[USES_MUON]]
    dtype = getattr(optimizer, "dtype", torch.bfloat16)  # timm's relatives of Muon always compute in bf16
    text = f"Muon {size(muon)}, {muon[0]['ns_steps']} Newton-Schulz steps in {dtype_name(dtype)}"
    return f"{text}; AdamW {size(others)}" if others else text


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz steps, with decoupled weight decay.

    An update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the RMS of AdamW's updates: the learning rate
    and weight decay of AdamW fit both (https://arxiv.org/abs/2502.16982). Groups with `matrices` 0 are AdamW's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float | None,
        dtype: torch.dtype,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        """`groups`: those with a `matrices` above 0 are Muon's, all others AdamW's.

        `momentum`: None for the default, MOMENTUM. `dtype`: of the Newton-Schulz steps. `fused`: use torch's fused
        AdamW.
        """
        self.dtype = dtype
        momentum = MOMENTUM if momentum is None else momentum
        # Defaults of all groups. torch looks for `fused` in the groups: it then loads AdamW's counts of steps to the
        # device.
        muon = {"momentum": momentum, "nesterov": True, "ns_steps": NS_STEPS, MATRICES: 0}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": fused, "weight_decay": 0.0, **muon})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. `closure` is never used: torch's type hints want it."""
        pending: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}
        """Shape -> (matrix, its direction before it is made orthogonal, learning rate) of each matrix"""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [weight.grad for weight in weights]
            matrices_per_weight = group[MATRICES]  # 3 for a fused qkv, whose rows are those of q, then k, then v
            if matrices_per_weight == 0:
                self._step_adamw(group, weights, gradients)
                continue

            # Nesterov's momentum: the buffer moves towards the gradient, and the update is a mean of both.
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            nesterov_updates = torch._foreach_lerp(gradients, buffers, group["momentum"])

            # Weight decay, and the matrices of each weight, which are views of it
            for weight, update in zip(weights, nesterov_updates, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                matrices = weight.chunk(matrices_per_weight)
                updates = update.chunk(matrices_per_weight)
                for matrix, matrix_update in zip(matrices, updates, strict=True):
                    direction = matrix_update.flatten(1)  # of a convolution: one row per output
                    pending.setdefault(direction.shape, []).append((matrix, direction, group["lr"]))

        for shape, entries in pending.items():
            self._step_matrices(shape, entries)

    def _step_matrices(self, shape: torch.Size, entries: list[tuple[Tensor, Tensor, float]]) -> None:
        """Move matrices of one `shape` along their directions, which are first made orthogonal.

        `entries`: (matrix, direction, learning rate). All are orthogonalised as one batch: few, large products.
        """
        directions = torch.stack([direction for _, direction, _ in entries])
        orthogonal = zeropower_via_newtonschulz(directions, NS_STEPS, COEFFICIENTS, dtype=self.dtype)
        for (matrix, _, rate), direction in zip(entries, orthogonal.unbind(), strict=True):
            # 0.2 sqrt(max(rows, columns)) gives the update the RMS of AdamW's.
            step_size = rate * 0.2 * max(shape) ** 0.5
            matrix.add_(direction.view(matrix.shape).to(matrix.dtype), alpha=-step_size)

    def _step_adamw(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the weights of a group by torch's AdamW; its state is made at the first step."""
        for weight in weights:
            state = self.state[weight]
            if state:
                continue
            device = weight.device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
