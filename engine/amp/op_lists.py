"""Makes listed operators run in low precision (AMP.CUSTOM_WHITE_LIST) or in fp32 (AMP.CUSTOM_BLACK_LIST).

Autocast is a dispatch key: under it, torch calls the kernel registered at AutocastCPU or AutocastCUDA before the one
that computes. The lists register their own kernels there. So they act wherever autocast acts: in eager and compiled
models, under DDP and activation checkpointing. A TorchFunctionMode or TorchDispatchMode would not.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch._functorch.config as autograd_config
from torch.compiler import config as compiler_config

from utils.errors import UserError, nearest
from utils.log import log

# Name on a list -> overloads of the aten operator that Python calls by it. In-place variants (`+=`, `relu_`) cannot be
# listed: their precision is that of the tensor they write to.
UNDER_OWN_NAME = """
linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention
layer_norm rms_norm group_norm batch_norm
gelu relu silu sigmoid tanh softplus hardswish hardsigmoid leaky_relu
exp log square sqrt rsqrt reciprocal cumsum logsumexp cosine_similarity
max_pool2d avg_pool2d adaptive_avg_pool2d
mse_loss l1_loss smooth_l1_loss kl_div binary_cross_entropy_with_logits
"""
OPERATORS: dict[str, tuple[str, ...]] = {name: (name,) for name in UNDER_OWN_NAME.split()} | {
    "conv1d": ("conv1d", "conv1d.padding"),
    "conv2d": ("conv2d", "conv2d.padding"),
    "conv3d": ("conv3d", "conv3d.padding"),
    "conv_transpose2d": ("conv_transpose2d.input",),
    "softmax": ("softmax.int",),
    "log_softmax": ("log_softmax.int",),
    "add": ("add.Tensor",),
    "sub": ("sub.Tensor", "rsub.Scalar"),
    "mul": ("mul.Tensor",),
    "div": ("div.Tensor",),
    "pow": ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    "sum": ("sum", "sum.dim_IntList"),
    "mean": ("mean", "mean.dim"),
    "var": ("var.correction",),
    "prod": ("prod", "prod.dim_int"),
    "norm": ("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim"),
    "upsample_bilinear2d": ("upsample_bilinear2d.vec",),
    "upsample_bicubic2d": ("upsample_bicubic2d.vec",),
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss_nd", "nll_loss"),
}

# Paddle's names that torch does not have. Paddle's linear layers use matmul_v2 too.
PADDLE: dict[str, tuple[str, ...]] = {
    "matmul_v2": ("matmul", "linear", "mm", "bmm", "addmm"),
    "fc": ("linear",),
    "fused_gemm_epilogue": ("linear",),
    "fused_attention": ("scaled_dot_product_attention",),
    "flash_attn": ("scaled_dot_product_attention",),
    "depthwise_conv2d": ("conv2d",),
    "conv2d_transpose": ("conv_transpose2d",),
    "elementwise_add": ("add",),
    "elementwise_sub": ("sub",),
    "elementwise_mul": ("mul",),
    "elementwise_div": ("div",),
    "elementwise_pow": ("pow",),
    "reduce_mean": ("mean",),
    "reduce_sum": ("sum",),
    "reduce_prod": ("prod",),
    "p_norm": ("norm",),
    "frobenius_norm": ("norm",),
    "cos_sim": ("cosine_similarity",),
    "swish": ("silu",),
    "hard_swish": ("hardswish",),
    "hard_sigmoid": ("hardsigmoid",),
    "pool2d": ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
    "max_pool2d_with_index": ("max_pool2d",),
    "bilinear_interp_v2": ("upsample_bilinear2d",),
    "bicubic_interp_v2": ("upsample_bicubic2d",),
    "softmax_with_cross_entropy": ("cross_entropy",),
    "cross_entropy2": ("cross_entropy",),
    "sigmoid_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "kldiv_loss": ("kl_div",),
}


def check_names(white: Sequence[str], black: Sequence[str]) -> None:
    """Raise UserError for unknown operators, and for operators that are on both lists."""
    lists = {"AMP.CUSTOM_WHITE_LIST": white, "AMP.CUSTOM_BLACK_LIST": black}
    known = list(OPERATORS | PADDLE)
    for key, names in lists.items():
        for name in names:
            if name not in known:
                known_names = ", ".join(sorted(known))
                raise UserError(f"{key}: no operator {name!r}.{nearest(name, known)} Known: {known_names}.")
        if "mul" in names:
            log.warning("%s: mul is torch's elementwise product; Paddle's mul is called linear here.", key)
    both = operators_named(white).keys() & operators_named(black).keys()
    if both:
        raise UserError(
            f"AMP.CUSTOM_WHITE_LIST and AMP.CUSTOM_BLACK_LIST both name {', '.join(sorted(both))} (under torch's or "
            "Paddle's name); an operator can be on only one list."
        )


class OpLists:
    """Context manager that applies the lists of one run, inside autocast of `device_type` only.

    Enter it before the first compilation. Inside it a compiled backward pass runs outside autocast, as an eager one
    does; otherwise operators forced to fp32 would run in low precision again.
    """

    def __init__(self, device_type: str, white: Sequence[str], black: Sequence[str]) -> None:
        """`white`: operators to run in low precision. `black`: in fp32. Both by torch's or Paddle's names."""
        self.device_type = device_type
        self._names = tuple(white) + tuple(black)
        self.white = operators_named(white)
        self.black = operators_named(black)
        self._called: set[str] = set()
        """Listed operators that the model has called under autocast"""
        self._undo = ExitStack()
        """Undoes what `__enter__` did"""

    def __enter__(self) -> Self:
        """Register the lists' kernels at autocast's dispatch key, and let the compiler know of the lists."""
        if not (self.white or self.black):
            return self
        self._undo.callback(_reset_compiler)
        library = torch.library.Library("aten", "IMPL")
        self._undo.callback(library._destroy)
        key = f"Autocast{self.device_type.upper()}"
        with warnings.catch_warnings():
            # Overriding autocast's kernels is intended.
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            self._override(library, key, self.white, low=True)
            self._override(library, key, self.black, low=False)
        # torch caches compiled graphs on disk: graphs compiled with other lists must not be reused.
        tag = f"{compiler_config.cache_key_tag} {key} white={sorted(self.white)} black={sorted(self.black)}"
        self._undo.enter_context(compiler_config.patch(cache_key_tag=tag))  # pyright: ignore[reportAttributeAccessIssue]
        # Under autocast, a compiled backward pass would compute operators forced to fp32 in low precision again.
        self._undo.enter_context(autograd_config.patch(backward_pass_autocast="off"))
        _reset_compiler()
        return self

    def _override(
        self, library: torch.library.Library, key: str, operators: Mapping[str, Sequence[str]], low: bool
    ) -> None:
        """Register our kernels for `operators` at the dispatch key `key`. `low`: in low precision, else in fp32."""
        for name, overloads in operators.items():
            for overload in overloads:
                library.impl(overload, _kernel(name, overload, self.device_type, low, self._called), key)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def warn_uncalled(self) -> None:
        """Warn about listed operators that the model has not called under autocast; call it after the first update."""
        uncalled: list[str] = []
        for name in self._names:
            torch_names = operators_named([name]).keys()  # several for some of Paddle's names
            if self._called.isdisjoint(torch_names):
                uncalled.append(name)
        if uncalled:
            log.warning(
                "AMP.CUSTOM_WHITE_LIST and AMP.CUSTOM_BLACK_LIST: the model never calls %s; listing %s has no effect.",
                ", ".join(uncalled),
                "it" if len(uncalled) == 1 else "them",
            )


def operators_named(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return torch's name of each listed operator -> its overloads. Some of Paddle's names mean several operators."""
    overloads: dict[str, tuple[str, ...]] = {}
    for name in names:
        for torch_name in PADDLE.get(name, (name,)):
            overloads[torch_name] = OPERATORS[torch_name]
    return overloads


def _reset_compiler() -> None:
    """Drop the graphs that this process has compiled: the previous lists are built into them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _kernel(name: str, overload: str, device_type: str, low: bool, called: set[str]) -> Callable[..., Any]:
    """Make the autocast kernel of an operator: it casts the inputs, then calls the operator without autocast.

    `name`: the operator's name on AMP's lists, such as `sum`, which the kernel adds to `called`. `overload`: the aten
    overload to make the kernel of, such as `sum` or `sum.dim_IntList`. `low`: cast to autocast's low precision, else
    to fp32.
    """
    base, _, variant = overload.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), variant or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        dtype = torch.get_autocast_dtype(device_type) if low else torch.float32
        with torch.autocast(device_type, enabled=False):
            asks_for_dtype = any(isinstance(value, torch.dtype) for value in args + tuple(kwargs.values()))
            if asks_for_dtype:  # it is respected, as under torch's own lists
                return operator(*args, **kwargs)
            if name == "batch_norm":
                # Only the images are cast. Updates of the running statistics, in place, would be lost in a cast copy.
                cast_args = cast_floats(args[:1], dtype, device_type) + args[1:]
            else:
                cast_args = cast_floats(args, dtype, device_type)
            return operator(*cast_args, **cast_floats(kwargs, dtype, device_type))

    return kernel


HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def cast_floats(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Cast the floating tensors on the device, also inside tuples, lists and dicts. Like autocast, leave fp64 alone."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in FLOATS and value.device.type == device_type else value
    if isinstance(value, list | tuple):
        return type(value)(cast_floats(item, dtype, device_type) for item in value)
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype, device_type) for key, item in value.items()}
    return value
