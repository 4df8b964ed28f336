"""Reading PaddlePaddle's .pdparams files without running any code in them.

Such a file is a pickle, and a pickle is a program. This unpickler knows dicts and arrays of numbers, and refuses every
other name: none of what the file asks for by name is called but the four functions here.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.log import log
from vitamp.files import only_regular

EMA_KEYS = ("model_ema", "state_dict_ema")
WEIGHTS_KEYS = (*EMA_KEYS, "model", "state_dict")
"""Keys of the weights in a checkpoint; the EMA takes precedence, as in timm."""
SLICES = "UnpackBigParamInfor@@"
"""Paddle's entry about large arrays that are cut into pieces"""
KINDS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})
_ARRAY = object()
"""Stands for numpy.ndarray, so that the file cannot call it"""


class _Refused(Exception):
    """A request of the file that is refused; the text describes it."""


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name in a file that paddle.save wrote; in a checkpoint, those of the model."""
    try:
        with open(path, "rb", opener=only_regular) as file:
            content = _Unpickler(file, encoding="latin1").load()
        return _arrays(content, path.stat().st_size)
    except _Refused as refused:
        raise UserError(
            f"{path}: {refused}. No valid file of weights does this; the file is refused, and nothing in it was run."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} cannot be read as a file of paddle.save ({error or type(error).__name__}): it is damaged, cut "
            "off, or in another format."
        ) from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            module = "numpy"
        known = {
            "numpy.ndarray": _ARRAY,
            "numpy.dtype": _dtype,
            "numpy._reconstruct": _new_array,
            "numpy.scalar": lambda kind, data: np.frombuffer(data, kind)[0],
            "_codecs.encode": lambda text, _encoding: text.encode("latin1"),  # bytes, as protocol 2 writes them
            "collections.OrderedDict": OrderedDict,
            # Name and array of a tensor, as newer versions of paddle.save write it.
            "builtins.tuple": tuple,
            "__builtin__.tuple": tuple,
        }
        if f"{module}.{name}" not in known:
            raise _Refused(f"it imports {module}.{name}")
        return known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it uses persistent ids")


def _dtype(code: Any, *_flags: Any) -> np.dtype[Any]:
    if code not in KINDS:
        raise _Refused(f"it has an array of dtype {code!r}; only real numbers and booleans can be read")
    return np.dtype(code, copy=True)  # the byte order, which comes next, is set in it


def _new_array(kind: Any, *_: Any) -> np.ndarray:
    """An empty array: its shape and numbers come next, and numpy checks that they agree."""
    if kind is not _ARRAY:
        raise _Refused("it creates an array in another way than numpy does")
    return np.ndarray((0,), "b")


def _arrays(content: Any, size: int) -> dict[str, np.ndarray]:
    keys = [key for key in WEIGHTS_KEYS if isinstance(content, dict) and key in content]
    if len(keys) > 1 and keys[0] in EMA_KEYS:
        log.info("The checkpoint holds %s: the EMA is used.", " and ".join(keys))
    inner = content[keys[0]] if keys else content
    if not isinstance(inner, dict):
        raise ValueError(f"it holds a {type(inner).__name__} instead of a dict of arrays by name")
    arrays: dict[str, np.ndarray] = {}
    for name, value in inner.items():
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if isinstance(array, np.ndarray):
            arrays[str(name)] = array
    # Many names for the same bytes would take much more memory once they are converted.
    if sum(array.nbytes for array in arrays.values()) > size:
        raise _Refused("its arrays are larger than the file")
    for name, entry in (inner.get(SLICES) or {}).items():
        pieces = [arrays.pop(piece).reshape(-1) for piece in entry["slices"]]
        arrays[str(name)] = np.concatenate(pieces).reshape([int(side) for side in entry["OriginShape"]])
    if not arrays:
        raise ValueError("it has no arrays")
    return arrays
