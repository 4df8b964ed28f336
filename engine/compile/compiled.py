"""Compiles the forward and backward pass of a micro-batch by torch.compile.

Calls are compiled, and no module is wrapped, so names in checkpoints and in the EMA do not change.
"""

# torch's type stubs lack the compiler's settings.
# pyright: reportAttributeAccessIssue=false

import logging
import os
import re
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from timm.layers.patch_dropout import PatchDropout
from torch import Tensor, nn

from datasets import Batch
from engine.amp.precision import Precision
from engine.callback import Callback, Computing
from engine.compile.fewer_bytes import SaveResiduals, rewrite_blocks
from engine.inputs.batches import no_transform
from engine.machine.device import processor
from engine.machine.late_compiler import uncompiled
from engine.update import ForwardResult
from models.parts import blocks_of
from utils.cache import cache_folder
from utils.config.data import DataConfig
from utils.distributed.world import World
from utils.errors import TrainingError, UserError, first_line
from utils.log import log

BACKEND = "inductor"
ATTENTION = " attention="
"""Start of our part of torch's graph-cache key."""
MAX_GRAPHS = 256
"""Per function. Each stochastic-depth rate of a block and each image size need a graph."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
NONE = "none"
BLOCKS = "blocks"
WHOLE = "whole"


class Compiling(Callback):
    """Compiles the forward and backward pass of whole micro-batches, in the way that `how` names.

    Each image size, and each fraction of dropped tokens, is compiled when it first occurs.

    The last micro-batch of an epoch may be smaller. It runs in eager mode, as it is not worth another graph.
    """

    def __init__(
        self, data: DataConfig, precision: Precision, world: World, sharded: bool, rewrites: bool = True
    ) -> None:
        """`sharded`: FSDP shards the model. `rewrites`: rewrite a ViT for the compiler (fewer_bytes.py)."""
        self.how = NONE
        """NONE, BLOCKS or WHOLE; set by `choose_compiling`"""
        self.auto = False
        """Whether `how` was chosen for the user: then code that cannot be compiled is no error"""
        self._gave_up = False
        """Whether torch could not compile the model, so that it runs in eager mode"""
        self.seconds = 0.0
        """Time spent compiling so far."""
        self._data = data
        self._precision = precision
        self._world = world
        self._sharded = sharded
        self._rewrites = rewrites
        self._token_drop = 0.0
        """Fraction of tokens that the current epoch drops"""
        self._compiled: set[tuple[torch.Size, float]] = set()
        """Shapes of images, with the fraction of dropped tokens, that are compiled"""

    def attach(self, to: Computing) -> None:
        """Compile what computes in `to`, the state of the training, and become its `compute`.

        Nothing is compiled yet, only marked: torch compiles at the first call.
        """
        if self.how == NONE:
            return
        _configure_compiler(self._data, self._precision, self._world, self._rewrites)
        self._computing = to
        self._compiled.clear()
        options: dict[str, Any] = {"backend": BACKEND, "fullgraph": True, "dynamic": False}
        if self.how == BLOCKS:
            self._compile_blocks(to.forward, options)
            self._compute = to.eager  # which calls the compiled blocks
        else:
            if self._rewrites:
                rewrite_blocks(to.forward, self._precision.fp8)
            self._compute = self._compile_whole(options)
        to.compute = self

    def _compile_blocks(self, model: nn.Module, options: dict[str, Any]) -> None:
        """Compile each block by itself, so that the last blocks' gradients are all-reduced during the backward pass."""
        for _, block in blocks_of(model):
            if self._sharded:  # only the block's own code: FSDP's hooks around it gather and free the weights
                block.forward = torch.compile(block.forward, **options)
            else:
                block.compile(**options)

    def enter(self, epoch: int, *models: nn.Module) -> None:
        """Read the fraction of dropped tokens from the models. Called after `TokenDrop` has set it."""
        self._token_drop = 0.0
        for model in models:
            for module in model.modules():
                if isinstance(module, PatchDropout):
                    self._token_drop = max(self._token_drop, module.prob)

    def __call__(self, batch: Batch) -> ForwardResult:
        """Compute a micro-batch: compiled, or in eager mode if it is smaller or the model cannot be compiled."""
        if self._gave_up or len(batch.images) != self._data.BATCH_SIZE:
            with uncompiled():
                return self._computing.eager(batch)
        kind = batch.images.shape, self._token_drop
        return self._compute(batch) if kind in self._compiled else self._compile_for(batch, kind)

    def _compile_for(self, batch: Batch, kind: tuple[torch.Size, float]) -> ForwardResult:
        """Compute the first micro-batch of its kind, which compiles the forward and the backward pass.

        UserError or TrainingError if torch cannot compile the model and TRAIN.COMPILE asked for it.
        """
        from torch._dynamo.exc import TorchDynamoException

        began = perf_counter()
        shape, token_drop = kind
        height, width = shape[-2:]
        compiled_part = "each block" if self.how == BLOCKS else "the forward and backward pass"
        duration = "minutes on a CPU" if batch.images.device.type == "cpu" else "about a minute"
        dropped = f", {100 * token_drop:g} % of the patches left out" if token_drop else ""
        message = "Compiling %s for %d x %d pixels%s: this update takes %s."
        log.info(message, compiled_part, height, width, dropped, duration)
        try:
            result = self._compute(batch)
        except TorchDynamoException as error:
            if self.auto:
                warning = "TRAIN.COMPILE auto: torch cannot compile this model (%s), so it is not compiled."
                log.warning(warning, first_line(error))
                self._gave_up = True
                return self(batch)  # now in eager mode
            alternatives = "none" if self.how == BLOCKS else "none, or blocks"
            error_class = TrainingError if self.seconds else UserError  # UserError before the first update is done
            raise error_class(
                f"TRAIN.COMPILE: torch cannot compile this model ({first_line(error)}). Set "
                f"TRAIN.COMPILE={alternatives}. If a run was killed while it compiled, remove the incomplete files in "
                f"{os.environ[CACHE]} first."
            ) from error
        seconds = perf_counter() - began
        self.seconds += seconds
        self._compiled.add(kind)
        log.info("Compiled in %.1f s; cached in %s for other runs.", seconds, os.environ[CACHE])
        self._computing.after_pause()  # compiling does not count in the speed of training
        return result

    def _compile_whole(self, options: dict[str, Any]) -> Callable[[Batch], ForwardResult]:
        """Compile one graph from uint8 images to the loss, and return the function that computes with it.

        A batch transform draws random numbers on the host, which a graph cannot: with one, the graph begins after it.
        """
        forward = self._computing.forward
        inputs = self._computing.inputs
        criterion = self._computing.criterion
        precision = self._precision
        batch_transform = self._computing.batch_transform
        from_uint8 = batch_transform is no_transform

        def to_loss(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            # Autocast is inside the graph: around it, the compiled backward pass would run under autocast too.
            with precision.autocast():
                logits = forward(inputs(images) if from_uint8 else images)
                return criterion(logits.float(), targets), logits.detach()

        graph = torch.compile(to_loss, **options)

        def compute(batch: Batch) -> ForwardResult:
            images = batch.images
            targets = batch.labels
            labels = batch.labels
            if not from_uint8:
                with precision.autocast():
                    images, targets, labels = batch_transform(inputs(images), labels)
            loss, logits = graph(images, targets)
            return ForwardResult(loss, logits, labels)

        return compute


def _configure_compiler(data: DataConfig, precision: Precision, world: World, rewrites: bool) -> None:
    """Set up torch's compiler for this run: its cache, the key of its graphs, its threads, and eager mode's numbers."""
    import torch._dynamo.config as tracing
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch's compiler caches in a folder of the user's own, because code in it is executed. Importing the compiler may
    # have set the variable to torch's default.
    if os.environ.get(CACHE, default_cache_dir()) == default_cache_dir():
        kind = re.sub(r"\W+", "-", f"{processor()} {torch.backends.cpu.get_cpu_capability()}")
        os.environ[CACHE] = str(cache_folder(data, f"compiled/{kind}"))
    tracing.recompile_limit = MAX_GRAPHS
    tracing.optimize_ddp = False  # it splits graphs at DDP's buckets; blocks are separate graphs already
    autograd.force_non_lazy_backward_lowering = True  # else the backward pass is compiled at its first call
    autograd.backward_pass_autocast = "off"  # as in eager mode
    # torch's key for cached graphs lacks the kind of attention, and autocast's dtype: torch 2.11 only distinguishes
    # autocast on and off, so blocks compiled in bf16 would be reused in fp16. Our part of the tag begins with ATTENTION
    # and goes to its end. It replaces that of an earlier run in this process.
    kinds = ("flash", "mem_efficient", "cudnn", "math")
    allowed_kinds = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    tag_of_others, _, _ = torch.compiler.config.cache_key_tag.partition(ATTENTION)
    our_tag = f"{ATTENTION}{','.join(allowed_kinds)} precision={precision.name}"
    torch.compiler.config.cache_key_tag = f"{tag_of_others}{our_tag}"
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # it advises a switch other than AMP.TF32
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # torch ignores other ranks and a CPU quota
        inductor.compile_threads = min(inductor.compile_threads or 1, world.own_cores)
    inductor.joint_custom_post_pass = SaveResiduals() if rewrites else None
    inductor.fallback_random = True  # the same dropout and stochastic depth as in eager mode
    if precision.device.type == "cpu":  # it warns about a missing GPU if the CUDA toolkit is installed
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
