"""Parts of a model by their names: its blocks, its classifiers, what is trained and what is frozen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitamp.checkpoints import ADAPTER

BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
BASE = "base_names"
"""Attribute of a model with adapters (MODEL.LORA): the names of its frozen weights."""


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    return (sum(p.numel() for p in module.parameters()), sum(p.numel() for p in module.parameters() if p.requires_grad))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def frozen_weights(model: nn.Module) -> list[str]:
    """Names of the weights that are not trained."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights of a model with adapters, which its checkpoints leave out; empty for any other model."""
    return {name: model.get_parameter(name).detach() for name in vars(model).get(BASE, ())}


def has_adapters(module: nn.Module) -> bool:
    """Whether a layer has adapters of its own (models/lora.py)."""
    return any(name.startswith(ADAPTER) for name, _ in module.named_parameters(recurse=False))


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the classifier modules, as timm's models report them: one, or two in a distilled model."""
    get = getattr(model, "get_classifier", None)
    heads = get() if get is not None else None
    names = {id(module): name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    known = tuple(names[id(head)] for head in (heads if isinstance(heads, tuple) else (heads,)) if id(head) in names)
    return known or tuple(name for name in names_in_cfg(model, "classifier") if name in names.values())


def overlapping_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """Those whose windows overlap; a convolution without is a matrix product."""
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return [one for one in found if any(size > step for size, step in zip(one.kernel_size, one.stride, strict=True))]


def is_convolutional(model: nn.Module) -> bool:
    """Whether it has convolutions with batch norms and no attention, as ResNet and EfficientNet, but not ConvNeXt."""
    attends = any("Att" in type(module).__name__ for module in model.modules())  # Attention, WindowAttn
    normed = any(isinstance(module, BATCH_NORM) for module in model.modules())
    return normed and not attends and bool(overlapping_convolutions(model))


def convolves_by_channel(model: nn.Module) -> bool:
    """Whether it has depthwise convolutions with batch norms, as EfficientNet and MobileNet have."""
    depthwise = any(one.groups == one.in_channels > 1 for one in overlapping_convolutions(model))
    return depthwise and any(isinstance(module, BATCH_NORM) for module in model.modules())


def pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """timm's settings of a model's weights; empty for models that are not timm's."""
    return vars(model).get("pretrained_cfg") or {}


def names_in_cfg(model: nn.Module, key: str) -> tuple[str, ...]:
    """Names of the modules under `classifier` or `first_conv` in timm's settings."""
    names = pretrained_cfg(model).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight or module is one of these modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each block with its name, the unit of sharding and compiling.

    In a model without `blocks`, the modules of every sequence of one type count as blocks.
    """

    def uniform(sequence: nn.Module) -> bool:
        """Whether all children have parameters and are of one type."""
        types = [type(child) for child in sequence.children() if any(True for _ in child.parameters())]
        return len(set(types)) == 1 and len(types) == len(list(sequence.children()))

    modules = dict(model.named_modules())
    named = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    sequences = {
        name: module
        for name, module in (named or modules).items()
        if isinstance(module, nn.Sequential | nn.ModuleList) and uniform(module)
    }
    yielded: list[str] = []
    for name, sequence in sequences.items():
        if is_inside(name, yielded):
            continue
        for number, block in sequence.named_children():
            if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
                yielded.append(f"{name}.{number}" if name else number)
                yield yielded[-1], block
