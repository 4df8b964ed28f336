"""PaddlePaddle's .pdparams files, read without running anything that stands in them.

Such a file is a pickle, and a pickle is a program. This one reads arrays of numbers in dicts, and stops at all else. Of
the functions an array's pickle calls none is called: each has a stand-in here, which can do nothing but what it is for.
Python's own unpickler is used instead of the one written in C, which a few bytes can make take all memory.
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
from utils.files import only_regular
from utils.log import log

EMA_IN = ("model_ema", "state_dict_ema")
WEIGHTS_IN = (*EMA_IN, "model", "state_dict")
"""Where a training's checkpoint keeps weights; an average goes before the model's own, as timm has it."""
NAMES, SLICES = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
"""Paddle's own entries: names of its graph, and how large arrays were cut into pieces."""
KINDS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})
OPCODES = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT
LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL
"""
"""That need no care of their own; those that do are methods below."""


class _Refused(Exception):
    """What the file asks for, in words."""


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that paddle.save wrote, by name; of a training's checkpoint those of the model."""
    try:
        size = path.stat().st_size
        with open(path, "rb", opener=only_regular) as file:
            content = _Unpickler(file, size).load()
        return _arrays(content, size)
    except _Refused as refused:
        raise UserError(
            f"{path}: {refused}. A file of weights needs no such thing: it is refused, and nothing in it was run."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path}: cannot be read as what paddle.save writes ({error or type(error).__name__}); it is damaged, cut "
            "off, or of another kind."
        ) from None


@dataclass(frozen=True)
class _Standin:
    """In the place of a function that a pickle names."""

    name: str
    call: Callable[..., Any]


class _Kind:
    """In the place of numpy.dtype."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        if code not in KINDS:
            raise _Refused(f"it has an array of {code!r}, and not of numbers")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        """(version, byte order, and what only records and times have)"""
        if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "=", "|"):
            raise _Refused("it has an array of records, and not of numbers")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """In the place of numpy.ndarray: the bytes in the file, seen as numbers."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        if not isinstance(kind, _Kind):
            raise _Refused("it has an array of objects, and not of numbers")
        data = data.encode("latin1") if isinstance(data, str) else data  # as Python 2 wrote it
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.dtype.itemsize:
            raise ValueError(f"an array of {shape} has other than its {math.prod(shape)} numbers")
        self.value = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if by_columns else "C")


_InPython: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_InPython):
    stack: list[Any]

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(_Bounded(file, size), encoding="latin1")
        self._room = size
        array = _Standin("numpy.ndarray", _not_called)
        made = {
            "_reconstruct": lambda kind, *_: _Array() if kind is array else _not_called(),
            "scalar": _scalar,
        }
        self._known = {
            ("numpy", "ndarray"): array,
            ("numpy", "dtype"): _Standin("numpy.dtype", _Kind),
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
            raise _Refused(f"it asks for {module}.{name}")
        return known

    def _encode(self, text: str, encoding: str) -> bytes:
        """How protocol 2 writes bytes. All of them stand in the file; one that is used again and again could bloat."""
        self._room -= len(text)
        if encoding not in ("latin1", "latin-1") or self._room < 0:
            raise _Refused("it asks for more bytes than it holds")
        return text.encode("latin1")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if not isinstance(self.stack[-1], _Standin):
            raise _Refused(f"it calls what is no function ({type(self.stack[-1]).__name__})")
        self.stack[-1] = self.stack[-1].call(*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Kind):
            raise _Refused(f"it changes what is no array ({type(self.stack[-1]).__name__})")
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
            raise _Refused(f"it fills what is no dict ({type(self.stack[-1]).__name__})")
        self.stack[-1].update(_dict_of(pairs))

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii", "replace") for _ in range(2))
        raise _Refused(f"it asks for {module}.{name}")

    def load_other(self) -> None:
        raise _Refused("it asks for objects, persistent ids or extensions")

    dispatch = dict.fromkeys(_InPython.dispatch, load_other)
    dispatch |= {code: _InPython.dispatch[code] for code in (getattr(pickle, name)[0] for name in OPCODES.split())}
    dispatch |= {pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build, pickle.INST[0]: load_inst}
    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict}


class _Bounded:
    """A file of which nobody asks for more than is there: asked for it, Python would first make room."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size
        self.readline = file.readline

    def read(self, count: int = -1) -> bytes:
        left = self._left - self._file.tell()
        if not 0 <= count <= left:
            raise EOFError(f"{count} bytes are announced where {left} are left")
        return self._file.read(count)


def _not_called(*_: Any) -> Any:
    raise _Refused("it makes an array in a way that numpy does not")


def _scalar(kind: Any, data: Any) -> Any:
    one = _Array()
    one.build((1, (), kind, False, data))
    return one


def _named_array(pair: Any) -> tuple[Any, Any]:
    """A tensor, as paddle.save writes it in newer versions: its name and its numbers."""
    name, array = pair
    return name, array


def _dict_of(pairs: Iterable[Any] = ()) -> dict[Any, Any]:
    """Keys are words or numbers: to look up a tuple of tuples of tuples could take for ever."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str | int):
            raise _Refused(f"it has a dict by {type(key).__name__}")
        found[key] = value
    return found


def _arrays(content: Any, size: int) -> dict[str, np.ndarray]:
    there = [key for key in WEIGHTS_IN if isinstance(content, dict) and key in content]
    if len(there) > 1 and there[0] in EMA_IN:
        log.info("It holds %s: the EMA is used.", " and ".join(there))
    inner = content[there[0]] if there else content
    if not isinstance(inner, dict):
        raise ValueError(f"a {type(inner).__name__} is in it, and no dict of arrays by name")
    found: dict[str, np.ndarray] = {}
    for name, value in inner.items():
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if isinstance(array, _Array) and array.value is not None:
            found[str(name)] = array.value
    # The same bytes by many names would grow once they are converted.
    if sum(array.nbytes for array in found.values()) > size:
        raise _Refused("its arrays are larger than the file")
    _join(found, inner.get(SLICES) or {})
    if not found:
        raise ValueError("there are no arrays in it")
    return found


def _join(found: dict[str, np.ndarray], cut: dict[str, Any]) -> None:
    for name, how in cut.items():
        pieces = [found.pop(piece).reshape(-1) for piece in how["slices"]]
        found[str(name)] = np.concatenate(pieces).reshape([int(side) for side in how["OriginShape"]])
