"""`-print_amp`: the precision each module of a model really has, seen in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.amp.fp32_modules import is_forced
from engine.amp.op_lists import OPERATORS

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
HEADINGS = ("module", "class", "parameters", "inputs", "outputs", "operations")

# What an operator is called once autocast and autograd are behind it -> its name on the lists.
LOWERED = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "native_group_norm": "group_norm",
    "linalg_vector_norm": "norm",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "max_pool2d_with_indices": "max_pool2d",
    "cross_entropy_loss": "cross_entropy",
    "nll_loss_forward": "nll_loss",
    "addmm": "linear",
    "bmm": "matmul",
    "mm": "matmul",
    "cpu_linear": "linear",
    "packed_attention": "scaled_dot_product_attention",
}
CONVOLUTIONS = {3: "conv1d", 4: "conv2d", 5: "conv3d"}


@dataclass
class Seen:
    """What one module's forward calls were given, gave back, and computed themselves, in order, each once."""

    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    operations: dict[tuple[str, str], None] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A module of the table, or several numbered ones that agree in everything. `label` ends their names."""

    label: str
    cells: tuple[str, ...]
    inside: tuple[Row, ...]


def amp_table(model: nn.Module, run_forward: Callable[[], object]) -> str:
    """The table for `model`. `run_forward` runs it once, not compiled, just as training would: under its autocast."""
    watch = _Watch(model)
    with watch:
        run_forward()
    rows = _fold(_row(name, child, watch.seen) for name, child in model.named_children())
    root = (type(model).__name__, *_cells(model, watch.seen[model]))
    lines = [HEADINGS, ("(model)", *root), *_lines(rows)]
    text = _aligned(lines)
    if any(is_forced(module) for module in model.modules()):
        text += "\n* kept in fp32 by AMP.FP32_MODULES: inputs are cast on entry"
    return text


class _Watch(TorchDispatchMode):
    """Sees every operation with the precision it runs in, and knows the module it belongs to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = {module: Seen() for module in model.modules()}
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for module in self.seen:
            self._handles.append(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        self.seen[module].inputs.update(dict.fromkeys(_dtypes((args, kwargs))))

    def _leave_module(self, module: nn.Module, args: Any, outputs: Any) -> None:  # noqa: ARG002
        self._inside.pop()
        self.seen[module].outputs.update(dict.fromkeys(_dtypes(outputs)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self._inside:
            module = self._inside[-1]
            name = _name(func.overloadpacket.__name__, module, args)
            if name in OPERATORS:
                # The result comes first; statistics that a norm keeps beside it may have another precision.
                for dtype in _dtypes(outputs, floating=True)[:1]:
                    self.seen[module].operations[name, dtype] = None
        return outputs


def _name(name: str, module: nn.Module, args: Sequence[Any]) -> str:
    """The name on the lists of an operator as it is called when it runs."""
    if name == "mm" and isinstance(module, nn.Linear):
        return "linear"
    if "convolution" in name:
        return CONVOLUTIONS.get(args[1].dim(), name)
    if "batch_norm" in name:
        return "batch_norm"
    if name.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    return LOWERED.get(name, name.removesuffix("_"))


def _dtypes(values: Any, floating: bool = False) -> list[str]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [_short(t.dtype) for t in tensors if t.is_floating_point() or not floating]


def _short(dtype: torch.dtype) -> str:
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _cells(module: nn.Module, seen: Seen) -> tuple[str, ...]:
    """Parameters, inputs, outputs, operations."""
    parameters = dict.fromkeys(_short(p.dtype) for p in module.parameters())
    named: dict[str, list[str]] = {}
    for name, dtype in seen.operations:
        named.setdefault(name, []).append(dtype)
    operations = ", ".join(f"{name} {'+'.join(dtypes)}" for name, dtypes in named.items())
    star = "*" if is_forced(module) else ""
    return _joined(parameters), _joined(seen.inputs) + star, _joined(seen.outputs), operations


def _joined(dtypes: Iterable[str]) -> str:
    return "+".join(dtypes) or "-"


def _row(label: str, module: nn.Module, seen: dict[nn.Module, Seen]) -> Row:
    cells = (type(module).__name__, *_cells(module, seen[module]))
    children = (_row(name, child, seen) for name, child in module.named_children())
    return Row(label, cells, tuple(_fold(children)))


def _fold(rows: Iterable[Row]) -> Iterator[Row]:
    """Numbered rows that agree in everything become one: blocks.0-11. Identities, which do nothing, go."""
    alike: dict[Row | str, tuple[Row, list[int]]] = {}
    for row in rows:
        if row.cells[0] == "Identity":
            continue
        if row.label.isdecimal():
            alike.setdefault(replace(row, label=""), (row, []))[1].append(int(row.label))
        else:
            alike[row.label] = row, []
    for row, numbers in alike.values():
        yield replace(row, label=_ranges(numbers)) if numbers else row


def _ranges(numbers: Sequence[int]) -> str:
    """0-2,4 of 0, 1, 2, 4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _lines(rows: Iterable[Row], under: str = "") -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (under + row.label, *row.cells)
        yield from _lines(row.inside, f"{under}{row.label}.")


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
