"""torch.compile: the code that stands in for a micro-batch's way to its loss as it is written.

Calls are compiled, and no module is wrapped: names in checkpoints and averages stay as they are.
"""

# The compiler's settings are no part of torch's type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from datasets import Batch
from engine.amp.precision import Precision
from engine.compile.choice import BLOCKS, CUDA_GRAPHS, NONE, CompileChoice
from engine.inputs.mixup import unchanged
from engine.machine.device import processor
from engine.machine.late_compiler import uncompiled
from engine.update import Computed, Parts
from models.blocks import blocks_of
from utils.cache import cache_folder
from utils.config import Config
from utils.config.data import DataConfig
from utils.cpus import cores
from utils.errors import TrainingError, UserError
from utils.log import log

BACKEND = "inductor"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
ATTENTION = " attention="
"""Where what is ours begins in what torch's cache of graphs is asked by."""
MOST_GRAPHS = 256
"""Of one function. Blocks with a rate of stochastic depth of their own make a graph each; so do sizes of images."""


def compile_update(parts: Parts, choice: CompileChoice, config: Config) -> None:
    """Let updates run by compiled code, if that was chosen. What is compiled is compiled by the first of them."""
    if choice.how != NONE:
        _prepare_compiler(config.DATA, parts.precision)
        parts.compiled = Compiled(parts, choice, config.DATA.BATCH_SIZE)


class Compiled:
    """Computes micro-batches of `samples` images by compiled code, which each size of images makes anew.

    The last of an epoch may be smaller: not worth a graph of its own, it runs as it is written.
    """

    def __init__(self, parts: Parts, choice: CompileChoice, samples: int) -> None:
        self.choice = choice
        self.seconds = 0.0
        """That compiling took."""
        self.when_done: Callable[[], None] = lambda: None
        self._parts, self._samples = parts, samples
        self._sizes: set[torch.Size] = set()
        self.start()

    def start(self) -> None:
        """Compile what computes now; again when something else does."""
        self._sizes.clear()
        options: dict[str, Any] = {"backend": BACKEND, "fullgraph": True, "dynamic": False}
        if BACKEND == "inductor":
            options["mode"] = self.choice.torch_mode
        self._compute = self._blocks(options) if self.choice.how == BLOCKS else self._one_graph(options)

    def __call__(self, batch: Batch) -> Computed:
        if len(batch.images) != self._samples:
            with uncompiled():
                return self._parts.as_written(batch)
        return self._compute(batch) if batch.images.shape in self._sizes else self._first(batch)

    def _first(self, batch: Batch) -> Computed:
        """The first of its size, for which is compiled: the backward pass too, as it stands in the same graph."""
        from torch._dynamo.exc import TorchDynamoException

        began, size = perf_counter(), batch.images.shape
        what = "each block" if self.choice.how == BLOCKS else "all from images to loss"
        patience = "minutes on a CPU" if batch.images.device.type == "cpu" else "about a minute"
        log.info("Compiling %s, for %d x %d pixels: the update that begins takes %s.", what, *size[-2:], patience)
        try:
            computed = self._compute(batch)
        except TorchDynamoException as error:
            kind = TrainingError if self.seconds else UserError  # the latter before the first update is done
            raise kind(
                f"TRAIN.COMPILE {self.choice.how}: torch cannot compile this model ({_first_line(error)}). Set "
                f"TRAIN.COMPILE=none{', or blocks' if self.choice.how != BLOCKS else ''}."
            ) from error
        took = perf_counter() - began
        self.seconds += took
        self._sizes.add(size)
        log.info("Compiled in %.1f s; kept in %s for other runs.", took, os.environ[CACHE])
        self.when_done()
        return computed

    def _blocks(self, options: dict[str, Any]) -> Callable[[Batch], Computed]:
        """Each block a graph, so that gradients of the last ones travel while those of the first are computed."""
        parts = self._parts
        for _, block in blocks_of(_computing(parts)):
            if parts.sharding is None:
                block.compile(**options)
            else:  # what gathers the weights and lets go of them stays around it
                block.forward = torch.compile(block.forward, **options)
        return parts.as_written

    def _one_graph(self, options: dict[str, Any]) -> Callable[[Batch], Computed]:
        """From bytes to loss; where images are changed by numbers drawn on the host, from then on."""
        parts = self._parts
        forward, inputs, criterion, precision = parts.forward, parts.inputs, parts.criterion, parts.precision
        from_bytes = parts.change is unchanged

        def to_loss(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            # Autocast is entered in here: the backward pass of what is compiled under it would run under it, too.
            with precision.autocast():
                logits = forward(inputs(images) if from_bytes else images)
                return criterion(logits.float(), targets), logits.detach()

        graph = torch.compile(to_loss, **options)

        def compute(batch: Batch) -> Computed:
            images, targets, labels = batch.images, batch.labels, batch.labels
            if not from_bytes:
                with precision.autocast():
                    images, targets, labels = parts.change(inputs(images), labels)
            if self.choice.mode != CUDA_GRAPHS:
                return Computed(*graph(images, targets), labels)
            _make_way(forward)
            loss, logits = graph(images, targets)
            return Computed(loss.clone(), logits.clone(), labels)

        return compute


def _computing(parts: Parts) -> nn.Module:
    return parts.half_copy.model if parts.half_copy is not None else parts.model


def _make_way(model: nn.Module) -> None:
    """CUDA graphs write where they wrote before: what is still needed of earlier micro-batches must lie elsewhere."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
    torch.compiler.cudagraph_mark_step_begin()


def _prepare_compiler(data: DataConfig, precision: Precision) -> None:
    import torch._dynamo.config as tracing
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing the compiler may already have written torch's own choice there.
    if os.environ.get(CACHE, default_cache_dir()) == default_cache_dir():
        # A folder of the user's own, because what lies there is run; and of this kind of processor.
        kind = re.sub(r"\W+", "-", f"{processor()} {torch.backends.cpu.get_cpu_capability()}")
        os.environ[CACHE] = str(cache_folder(data, f"compiled/{kind}"))
    tracing.recompile_limit = MOST_GRAPHS
    tracing.optimize_ddp = False  # it cuts graphs where DDP's messages end; blocks are cut already
    autograd.force_non_lazy_backward_lowering = True  # or the backward pass is compiled when it is first called
    autograd.backward_pass_autocast = "off"  # as backward passes run that are not compiled
    _tell_graphs_apart(precision)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # AMP.TF32 is the switch, not the one it advises
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # torch does not look at a container's quota
        inductor.compile_threads = min(inductor.compile_threads or 1, cores())
    inductor.fallback_random = True  # the same dropout and stochastic depth as in code that is not compiled
    if precision.device.type == "cpu":  # it misses a GPU beside the CUDA toolkit
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _tell_graphs_apart(precision: Precision) -> None:
    """A graph that was kept has more built in than torch looks for it by.

    One kernel of attention; and where autocast is entered around it, as around blocks, autocast's dtype: torch 2.11
    asks whether there is autocast alone, and would run in bf16 under that of fp16.
    """
    from torch.compiler import config

    kinds = ("flash", "mem_efficient", "cudnn", "math")
    allowed = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    others = config.cache_key_tag.partition(ATTENTION)[0]
    config.cache_key_tag = f"{others}{ATTENTION}{','.join(allowed)} precision={precision.name}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
