"""Reading PaddlePaddle's .pdparams files without running any code in them.

Such a file is a pickle, and a pickle is a program. This unpickler accepts dicts of arrays of numbers and refuses
everything else. It calls none of the functions that the pickle of an array names: each has a harmless stand-in here.
It builds on Python's own unpickler, because a few bytes can make the one written in C allocate all memory.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
OPCODES = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT
LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL
"""
"""Opcodes that Python's unpickler may handle; methods below handle the others."""


class _Refused(Exception):
    """A request of the file that is refused; the text describes it."""


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name in a file that paddle.save wrote; in a checkpoint, those of the model."""
    try:
        size = path.stat().st_size
        with open(path, "rb", opener=only_regular) as file:
            content = _Unpickler(file, size).load()
        return _arrays(content, size)
    except _Refused as refused:
        raise UserError(
            f"{path}: {refused}. No valid file of weights does this; the file is refused, and nothing in it was run."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} cannot be read as a file of paddle.save ({error or type(error).__name__}): it is damaged, cut "
            "off, or in another format."
        ) from None


@dataclass(frozen=True)
class _Standin:
    """Stand-in for a function that a pickle names."""

    name: str
    call: Callable[..., Any]


class _Dtype:
    """Stand-in for numpy.dtype."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        if code not in KINDS:
            raise _Refused(f"it has an array of dtype {code!r}; only real numbers and booleans can be read")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        """Set the byte order. `state`: version, byte order, and fields that only records and times have."""
        if any(field is not None for field in state[2:5]) or state[1] not in ("<", ">", "=", "|"):
            raise _Refused("it has an array of records instead of numbers")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stand-in for numpy.ndarray: a view of bytes in the file."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        if not isinstance(kind, _Dtype):
            raise _Refused("it has an array of objects instead of numbers")
        data = data.encode("latin1") if isinstance(data, str) else data  # Python 2 pickles bytes as str
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.dtype.itemsize:
            raise ValueError(f"an array of shape {shape} does not have {math.prod(shape)} numbers")
        self.value = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if by_columns else "C")


_InPython: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_InPython):
    stack: list[Any]

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(_Bounded(file, size), encoding="latin1")
        self._bytes_left = size
        array = _Standin("numpy.ndarray", _not_called)
        made = {
            "_reconstruct": lambda kind, *_: _Array() if kind is array else _not_called(),
            "scalar": _scalar,
        }
        self._known = {
            ("numpy", "ndarray"): array,
            ("numpy", "dtype"): _Standin("numpy.dtype", _Dtype),
            ("_codecs", "encode"): _Standin("_codecs.encode", self._encode),
            ("collections", "OrderedDict"): _Standin("collections.OrderedDict", _dict_of),
            ("builtins", "tuple"): _Standin("tuple", _named_array),
            ("__builtin__", "tuple"): _Standin("tuple", _named_array),
        }
        for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
            self._known |= {(home, name): _Standin(name, call) for name, call in made.items()}

    def find_class(self, module: str, name: str) -> _Standin:
        known = self._known.get((module, name))
        if known is None:
            raise _Refused(f"it imports {module}.{name}")
        return known

    def _encode(self, text: str, encoding: str) -> bytes:
        """Bytes as protocol 2 writes them. Together they fit into the file, unless one is encoded over and over."""
        self._bytes_left -= len(text)
        if encoding not in ("latin1", "latin-1") or self._bytes_left < 0:
            raise _Refused("it asks for more bytes than it holds")
        return text.encode("latin1")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if not isinstance(self.stack[-1], _Standin):
            raise _Refused(f"it calls a {type(self.stack[-1]).__name__}, which is not a function")
        self.stack[-1] = self.stack[-1].call(*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Dtype):
            raise _Refused(f"it sets the state of a {type(self.stack[-1]).__name__}, which is not an array")
        self.stack[-1].build(state)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._put([(self.stack.pop(), value)])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._put(zip(items[::2], items[1::2], strict=True))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(_dict_of(zip(items[::2], items[1::2], strict=True)))

    def _put(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise _Refused(f"it adds items to a {type(self.stack[-1]).__name__}, which is not a dict")
        self.stack[-1].update(_dict_of(pairs))

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii", "replace") for _ in range(2))
        raise _Refused(f"it imports {module}.{name}")

    def load_other(self) -> None:
        raise _Refused("it creates objects or uses persistent ids or extensions")

    dispatch = dict.fromkeys(_InPython.dispatch, load_other)
    dispatch |= {code: _InPython.dispatch[code] for code in (getattr(pickle, name)[0] for name in OPCODES.split())}
    dispatch |= {pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build, pickle.INST[0]: load_inst}
    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict}


class _Bounded:
    """A file that refuses reads beyond its end, for which Python would first allocate the memory."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size
        self.readline = file.readline

    def read(self, count: int = -1) -> bytes:
        left = self._left - self._file.tell()
        if not 0 <= count <= left:
            raise EOFError(f"it announces {count} bytes, but {left} are left")
        return self._file.read(count)


def _not_called(*_: Any) -> Any:
    raise _Refused("it creates an array in another way than numpy does")


def _scalar(kind: Any, data: Any) -> Any:
    scalar = _Array()
    scalar.build((1, (), kind, False, data))
    return scalar


def _named_array(pair: Any) -> tuple[Any, Any]:
    """Name and array of a tensor, as newer versions of paddle.save write it."""
    name, array = pair
    return name, array


def _dict_of(pairs: Iterable[Any] = ()) -> dict[Any, Any]:
    """A dict with words or numbers as keys: looking up deeply nested tuples could take for ever."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str | int):
            raise _Refused(f"it has a dict with keys of type {type(key).__name__}")
        made[key] = value
    return made


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
        if isinstance(array, _Array) and array.value is not None:
            arrays[str(name)] = array.value
    # Many names for the same bytes would take much more memory once they are converted.
    if sum(array.nbytes for array in arrays.values()) > size:
        raise _Refused("its arrays are larger than the file")
    _join_slices(arrays, inner.get(SLICES) or {})
    if not arrays:
        raise ValueError("it has no arrays")
    return arrays


def _join_slices(arrays: dict[str, np.ndarray], sliced: dict[str, Any]) -> None:
    """Replace the pieces of each sliced array by the whole array."""
    for name, entry in sliced.items():
        pieces = [arrays.pop(piece).reshape(-1) for piece in entry["slices"]]
        arrays[str(name)] = np.concatenate(pieces).reshape([int(side) for side in entry["OriginShape"]])
