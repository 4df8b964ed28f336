"""Find parts of a model by their names: its blocks, its classifiers, its trained and its frozen weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitamp.checkpoints import ADAPTER

BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
BASE = "base_names"
"""Attribute of a model with adapters (MODEL.LORA): the names of its frozen weights."""


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters and the number of trainable ones."""
    total = sum(weight.numel() for weight in module.parameters())
    trainable = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    return total, trainable


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def frozen_weights(model: nn.Module) -> list[str]:
    """List the names of the weights that are not trained."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights of a model with adapters, which its checkpoints leave out; empty for other models."""
    return {name: model.get_parameter(name).detach() for name in vars(model).get(BASE, ())}


def has_adapters(module: nn.Module) -> bool:
    """Tell whether a layer has adapters (models/lora.py); those of its submodules do not count."""
    return any(name.startswith(ADAPTER) for name, _ in module.named_parameters(recurse=False))


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the classifier modules: one, or two in a distilled model; empty if they are unknown.

    timm's models return the modules by `get_classifier`, or else list their names in the settings of their weights.
    """
    # Modules are compared by identity. A classifier without weights, such as nn.Identity, does not count.
    name_of = {id(module): name for name, module in model.named_modules() if has_weights(module)}
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if get_classifier is not None else None
    if not isinstance(heads, tuple):
        heads = (heads,)
    names = tuple(name_of[id(head)] for head in heads if id(head) in name_of)
    if names:
        return names
    return tuple(name for name in names_in_cfg(model, "classifier") if name in name_of.values())


def overlapping_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """List the convolutions whose windows overlap. A convolution whose windows do not is a matrix product."""
    convolutions = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            sizes_and_steps = zip(module.kernel_size, module.stride, strict=True)
            if any(size > step for size, step in sizes_and_steps):
                convolutions.append(module)
    return convolutions


def is_convolutional(model: nn.Module) -> bool:
    """Tell whether a model has overlapping convolutions, batch norms, and no attention.

    ResNet and EfficientNet do; ConvNeXt, which has no batch norms, does not.
    """
    has_attention = any("Att" in type(module).__name__ for module in model.modules())  # Attention, WindowAttn
    has_batch_norm = any(isinstance(module, BATCH_NORM) for module in model.modules())
    return has_batch_norm and not has_attention and bool(overlapping_convolutions(model))


def convolves_by_channel(model: nn.Module) -> bool:
    """Tell whether a model has depthwise convolutions with batch norms, as EfficientNet and MobileNet have."""
    is_depthwise = any(layer.groups == layer.in_channels > 1 for layer in overlapping_convolutions(model))
    return is_depthwise and any(isinstance(module, BATCH_NORM) for module in model.modules())


def pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """Return timm's settings of a model's weights; empty for models that are not timm's."""
    return vars(model).get("pretrained_cfg") or {}


def names_in_cfg(model: nn.Module, key: str) -> tuple[str, ...]:
    """Return the names of the modules that timm's settings list as `classifier` or `first_conv`, which is `key`."""
    names = pretrained_cfg(model).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Tell whether a weight or module is one of these modules or inside one, by their names."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each block of a model with its name. Blocks are the units of sharding and compiling.

    A block is an element of a sequence (nn.Sequential or nn.ModuleList) whose elements are all of one class and have
    weights. Only sequences called `blocks` count, unless the model has no module of this name.
    """
    modules = dict(model.named_modules())
    called_blocks = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    candidates = called_blocks or modules
    yielded_names: list[str] = []
    for name, sequence in candidates.items():
        if not _is_uniform_sequence(sequence) or is_inside(name, yielded_names):
            continue
        for number, block in sequence.named_children():
            if isinstance(block, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
                continue
            block_name = f"{name}.{number}" if name else number
            yielded_names.append(block_name)
            yield block_name, block


def _is_uniform_sequence(module: nn.Module) -> bool:
    """Tell whether a module is a sequence whose elements all have weights and are of one class."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    children = list(module.children())
    types = {type(child) for child in children}
    return len(types) == 1 and all(has_weights(child) for child in children)
