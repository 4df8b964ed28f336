"""Pickles of arrays, read without running any code in them: PaddleViT's weights and CIFAR's files.

A pickle is a program. This unpickler knows dicts and arrays of numbers or text, and refuses every other name: none of
what the file asks for by name is called but the functions here.
"""

import pickle
import re
from collections import OrderedDict
from typing import Any

import numpy as np

KINDS = re.compile(r"f[248]|[iu][1248]|b1|[SU]\d+")
"""Of numbers and text"""
_ARRAY = object()
"""Stands for numpy.ndarray, so that the file cannot call it"""


class Refused(Exception):
    """A request of the file that is refused; the text describes it."""


class ArraysOnly(pickle.Unpickler):
    """An unpickler for dicts and arrays, which refuses all other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle calls under this name: a function of ours that can do no harm; else raise Refused.

        The names are those by which numpy and PaddlePaddle pickle arrays.
        """
        known = {
            "numpy.ndarray": _ARRAY,
            "numpy.dtype": _dtype,
            "numpy._reconstruct": _new_array,
            "numpy._frombuffer": lambda data, kind, shape, order: np.frombuffer(data, kind).reshape(shape, order=order),
            "numpy.scalar": _number,
            "_codecs.encode": lambda text, _encoding: text.encode("latin1"),  # bytes, as protocol 2 writes them
            "collections.OrderedDict": OrderedDict,
            # Name and array of a tensor, as newer versions of paddle.save write it.
            "builtins.tuple": tuple,
            "__builtin__.tuple": tuple,
        }
        # Versions of numpy differ in the module: numpy.core.multiarray, numpy._core.numeric and others.
        short_module = re.sub(r"^numpy[.]_?core[.](multiarray|numeric)$", "numpy", module)
        wanted = f"{short_module}.{name}"
        if wanted not in known:
            raise Refused(f"it calls {wanted}")
        return known[wanted]

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("it uses persistent ids")


def _number(kind: Any, data: Any) -> Any:
    return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, kind)[0]  # Python 2 wrote a str


def _dtype(code: Any, *_flags: Any) -> np.dtype[Any]:
    if not KINDS.fullmatch(str(code)):
        raise Refused(f"it has an array of dtype {code!r}; only real numbers, booleans and text can be read")
    return np.dtype(code, copy=True)  # the byte order, which comes next, is set in it


def _new_array(kind: Any, *_: Any) -> np.ndarray:
    """An empty array: its shape and numbers come next, and numpy checks that they agree."""
    if kind is not _ARRAY:
        raise Refused("it creates an array in another way than numpy does")
    return np.ndarray((0,), "b")
