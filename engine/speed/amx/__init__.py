"""Linear layers, MLPs and attention by AMX, the bf16 matrix units of some CPUs.

Only this package knows of AMX; others use the names below. docs/dev/kernels.md explains how it works.
"""

from engine.speed.amx import attention
from engine.speed.amx.build import set_kernel_folder
from engine.speed.amx.layers import is_linear, linear, mlp, use_linear_layers, why_not

__all__ = ["attention", "is_linear", "linear", "mlp", "set_kernel_folder", "use_linear_layers", "why_not"]
