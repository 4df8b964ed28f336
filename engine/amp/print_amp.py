"""Makes the table of -print_amp: the precision that each module computes in, recorded in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.amp.low_precision import half_copy_of, is_forced
from engine.amp.op_lists import OPERATORS, OpLists
from engine.amp.precision import dtype_name
from engine.machine.device import pick_device, set_up_device
from engine.setup import tuned_model
from utils.config import Config
from utils.distributed.world import ALONE
from utils.text import aligned

HEADINGS = ("module", "class", "parameters", "inputs", "outputs", "operations")

# Operator as it is dispatched below autocast and autograd -> its name on AMP's lists.
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
    "packed_attention": "scaled_dot_product_attention",
}
CONVOLUTIONS = {3: "conv1d", 4: "conv2d", 5: "conv3d"}


@dataclass
class ModuleDtypes:
    """Dtypes of a module's inputs, outputs and own operations. The keys of each dict are a set that keeps its order."""

    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    operations: dict[tuple[str, str], None] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Row of the table for one module, or for several numbered modules with equal rows.

    `label` is the last part of the module's name, or a range such as 0-11.
    """

    label: str
    cells: tuple[str, ...]
    inside: tuple[Row, ...]


def show_precisions(config: Config) -> str:
    """Return the table of -print_amp for the model of these settings."""
    device = pick_device(config.DEVICE, ALONE)
    set_up_device(config, device, ALONE)
    tuned = tuned_model(config, device)
    model = tuned.model
    normalize = tuned.inputs  # the module that makes a model's inputs of uint8 images
    precision = tuned.precision
    if precision.computes_in_copy:
        model, _ = half_copy_of(model, precision)
    images = torch.randint(0, 256, (2, *config.DATA.shape), dtype=torch.uint8, device=device)

    def run_forward() -> None:
        with precision.autocast():
            model(normalize(images))

    with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
        return f"{config.MODEL.NAME} in {precision.line()}\n\n{amp_table(model, run_forward)}"


def amp_table(model: nn.Module, run_forward: Callable[[], object]) -> str:
    """Return the table for `model`.

    `run_forward`: runs the model once, as training does: under autocast, but not compiled.
    """
    with _DtypeRecorder(model) as recorder:
        run_forward()
    model_row = _row("(model)", model, recorder.dtypes)
    rows_of_modules = _rows_of_cells(model_row.inside)
    lines = aligned([HEADINGS, (model_row.label, *model_row.cells), *rows_of_modules])
    if any(is_forced(module) for module in model.modules()):
        lines.append("* kept in fp32 by AMP.FP32_MODULES: inputs are cast on entry")
    return "\n".join(lines)


class _DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of every operation under the module that calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dtypes = {module: ModuleDtypes() for module in model.modules()}
        self._inside: list[nn.Module] = []
        self._hooks = ExitStack()

    def __enter__(self) -> _DtypeRecorder:
        for module in self.dtypes:
            self._hooks.enter_context(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
            self._hooks.enter_context(module.register_forward_hook(self._leave_module, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        self.dtypes[module].inputs.update(dict.fromkeys(_dtypes((args, kwargs))))

    def _leave_module(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._inside.pop()
        self.dtypes[module].outputs.update(dict.fromkeys(_dtypes(outputs)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel. If its operator can be on AMP's lists, record the output's dtype for the innermost module."""
        outputs = func(*args, **(kwargs or {}))
        if self._inside:
            module = self._inside[-1]
            name = _name_on_lists(func.overloadpacket.__name__, module, args)
            if name in OPERATORS:
                # The first output is the result. The others, such as a norm's statistics, may have another dtype.
                for dtype in _dtypes(outputs, floating=True)[:1]:
                    self.dtypes[module].operations[name, dtype] = None  # the keys are an ordered set
        return outputs


def _name_on_lists(name: str, module: nn.Module, args: Sequence[Any]) -> str:
    """Return the name that AMP's lists have for an operator.

    `name`: aten's name of the operator that runs below autocast, into which torch has split or renamed the operator
    that was called. Some of these names fit several operators; the calling `module` or the arguments decide then.
    """
    if name == "mm" and isinstance(module, nn.Linear):
        return "linear"
    if "convolution" in name:
        weight = args[1]
        return CONVOLUTIONS.get(weight.dim(), name)
    if "batch_norm" in name:
        return "batch_norm"
    if name.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    return LOWERED.get(name, name.removesuffix("_"))


def _dtypes(values: Any, floating: bool = False) -> list[str]:
    """List the dtypes of all tensors in nested `values`. `floating`: leave out integers and booleans."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [dtype_name(t.dtype) for t in tensors if t.is_floating_point() or not floating]


def _row(label: str, module: nn.Module, dtypes: dict[nn.Module, ModuleDtypes]) -> Row:
    """Make the row of a module, with the rows of the modules inside it. `dtypes`: what was recorded of each module."""
    recorded = dtypes[module]
    dtypes_of_operation = dict[str, list[str]]()
    for operation, dtype in recorded.operations:
        dtypes_of_operation.setdefault(operation, []).append(dtype)
    parameters = dict.fromkeys(dtype_name(p.dtype) for p in module.parameters())
    operations = ", ".join(f"{name} {'+'.join(its_dtypes)}" for name, its_dtypes in dtypes_of_operation.items())
    inputs = _joined(recorded.inputs)
    if is_forced(module):
        inputs += "*"  # explained below the table
    cells = (type(module).__name__, _joined(parameters), inputs, _joined(recorded.outputs), operations)
    children = [_row(name, child, dtypes) for name, child in module.named_children()]
    return Row(label, cells, inside=tuple(_merge_equal_rows(children)))


def _joined(dtypes: Iterable[str]) -> str:
    return "+".join(dtypes) or "-"


def _merge_equal_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Merge numbered rows that are equal except for the number into one (blocks.0-11); leave out Identity modules."""
    # Each group is one row of the result: its first row, and the numbers of all rows in it; no numbers if the label is
    # a name. Numbered rows share a group if they are equal without their labels; a named row has its own.
    groups: dict[Row | str, tuple[Row, list[int]]] = {}
    for row in rows:
        class_name = row.cells[0]
        if class_name == "Identity":
            continue
        if row.label.isdecimal():
            without_number = replace(row, label="")
            _, numbers = groups.setdefault(without_number, (row, []))
            numbers.append(int(row.label))
        else:
            groups[row.label] = row, []
    for row, numbers in groups.values():
        yield replace(row, label=_ranges(numbers)) if numbers else row


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers as ranges: 0, 1, 2, 4 -> '0-2,4'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _rows_of_cells(rows: Iterable[Row], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row and of the rows inside it, with the module's full name as the first cell.

    `prefix`: name of the module around these rows, with a dot after it.
    """
    for row in rows:
        yield (prefix + row.label, *row.cells)
        yield from _rows_of_cells(row.inside, f"{prefix}{row.label}.")
