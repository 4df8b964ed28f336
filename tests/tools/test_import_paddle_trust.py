"""A pickle with anything but arrays is refused, and a damaged one is reported."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from models.weights.fit import load_pretrained
from models.weights.paddle_file import read_pdparams
from tests.tools.paddle_files import Tool, tool_of, write
from utils.errors import UserError


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return tool_of(capsys)


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class WithId(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return Calls(os.system, "touch ran") if isinstance(obj, set) else None


def by_persistent_id() -> bytes:
    stream = io.BytesIO()
    WithId(stream, 2).dump({"w": {1}})
    return stream.getvalue()


def objects() -> np.ndarray:
    return np.array([Calls(os.system, "touch ran"), 1], dtype=object)


MALICIOUS: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps({"w": Calls(os.system, "touch ran")}), "posix.system"),
    "os.system, protocol 0": (pickle.dumps({"w": Calls(os.system, "touch ran")}, 0), "posix.system"),
    "numpy's own": (pickle.dumps({"w": Calls(np.load, "ran")}), "numpy.load"),
    "nested": (pickle.dumps({"model": {"w": [({"a": Calls(eval, "open('ran', 'w')")},)]}}), "builtins.eval"),
    "in a persistent id": (by_persistent_id(), "posix.system"),
    "a persistent id": (b"\x80\x02}U\x01wU\x01xQs.", "persistent ids"),
    "an array of objects": (pickle.dumps({"w": objects()}), "'O8'"),
    "an array of records": (pickle.dumps({"w": np.zeros(2, [("a", "f4")])}), "'V4'"),
    "an instance": (b"(iposix\nsystem\np0\n.", "posix.system"),
    "an object": (b"(cposix\nsystem\nS'touch ran'\no.", "posix.system"),
    "a subclass in the array's place": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\nK\x00\x85U\x01btR.",
        "in another way than numpy does",
    ),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_pickle_is_refused_and_not_executed(
    kind: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = MALICIOUS[kind]
    (tmp_path / "w.pdparams").write_bytes(content)
    code, said = tool(tmp_path / "w.pdparams")
    assert code == 2, said
    assert told in said
    assert "nothing in it was run" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pdparams"]
    with pytest.raises(UserError, match=r"w\.pdparams"):
        load_pretrained(nn.Linear(1, 1), str(tmp_path / "w.pdparams"), "linear")
    assert not (tmp_path / "ran").exists()


def huge(size: int) -> bytes:
    """Array of three numbers whose shape claims `size` numbers."""
    content = pickle.dumps({"w": np.arange(3, dtype=np.float32)}, protocol=2)
    assert content.count(b"K\x03\x85") == 1
    return content.replace(b"K\x03\x85", b"\x8a\x05" + size.to_bytes(5, "little") + b"\x85")


BROKEN: dict[str, bytes] = {
    "no pickle": b"PK\x03\x04 what is this",
    "empty": b"",
    "cut off": pickle.dumps({"w": np.arange(300.0)})[:-500],
    "no dict": pickle.dumps([1, 2]),
    "no arrays": pickle.dumps({"epoch": 3}),
    "a shape without numbers": huge(2**38),
    "bytes that are not there": b"\x80\x04}U\x01w\x8e" + struct.pack("<Q", 2**40) + b"x",
    "a call of what is no function": b"\x80\x02U\x01x)R.",
    "an extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_file_is_refused(kind: str, tmp_path: Path, tool: Tool) -> None:
    (tmp_path / "w.pdparams").write_bytes(BROKEN[kind])
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "w.pdparams"))):
        read_pdparams(tmp_path / "w.pdparams")
    assert tool(tmp_path / "w.pdparams")[0] == 2


def test_small_file_cannot_expand(tmp_path: Path) -> None:
    """One array under a thousand names."""
    array = np.arange(10_000.0)
    write(tmp_path / "w.pdparams", {str(n): array for n in range(1000)})
    with pytest.raises(UserError, match="larger than the file"):
        read_pdparams(tmp_path / "w.pdparams")
