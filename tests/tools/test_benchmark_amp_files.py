"""benchmark_amp.py and choose_precision.py on image files exit cleanly and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import ROOT

WORDS = ("-num_classes", "4", "-num_workers", "2", "-image_size", "32", "-batch_size", "4")
SMALL_VIT = ("MODEL.PATCH_SIZE=16", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")
COMMANDS = {
    "amp": "benchmark_amp.py amp -iters 2 -windows 2",
    "precisions": "benchmark_amp.py precisions -modes bf16 -iters 2 -rounds 1",
    "timm": "benchmark_amp.py timm -precisions fp32 -updates 2 -rounds 1",
    "choose_precision": "choose_precision.py -modes bf16 -updates 5",
}
SECONDS_TO_LEAVE = 10
"""For multiprocessing's servers, which exit once all their clients have exited."""


@pytest.mark.skipif(sys.platform != "linux", reason="a session's processes are read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_command_leaves_no_process(name: str, imagenet: Path, tmp_path: Path) -> None:
    script, *words = COMMANDS[name].split()
    files = () if name == "timm" else ("-dataset", "imagenet2012", "-data_path", str(imagenet))
    data = (*files, "-device", "cpu", "-threads", "1")
    output = ("-output", str(tmp_path / "out")) if name == "choose_precision" else ()
    command = [sys.executable, str(ROOT / "scripts" / script), *words, *data, *WORDS, *SMALL_VIT, *output]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(180)
        except subprocess.TimeoutExpired:
            code = None
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while (left := list(_processes_of(process.pid))) and code is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert code == 0, text
    assert "failed" not in text
    assert not left, text


def _processes_of(session: int) -> Iterator[int]:
    """Running processes of a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            yield int(stat.parent.name)
