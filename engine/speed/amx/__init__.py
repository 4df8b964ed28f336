"""Linear layers, MLPs and attention by AMX, the units of some CPUs that multiply matrices of bf16.

Whatever knows of AMX is in this package; others call it by these names. docs/dev/kernels.md explains how it works.
"""

from engine.speed.amx import attention
from engine.speed.amx.build import keep_kernels_in
from engine.speed.amx.layers import is_linear, linear, mlp, use_linear_layers, why_not

__all__ = ["attention", "is_linear", "keep_kernels_in", "linear", "mlp", "use_linear_layers", "why_not"]
