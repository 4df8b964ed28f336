"""bench/compiled_kernels.py, which compiles for a pretended H200; and what docs/dev/kernels.md says of its result."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT

RESULTS = ROOT / "docs" / "results" / "compiled_kernels.json"
TOKENS = 256 * 197


def totals(result: dict[str, Any]) -> tuple[float, float]:
    """TFLOP of the products, and GB that the kernels between them move."""
    rows = result["rows"]
    return sum(row["gigaflops"] for row in rows) / 1000, sum(row["bytes_between"] for row in rows) / 1e9


def test_bytes_and_operations_on_the_page_are_those_of_the_results_file() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs" / "dev" / "kernels.md").read_text(encoding="utf-8").split())
    written = totals(results["as written"])
    rewritten = totals(results["rewritten"])
    assert f"{written[1]:.1f} to {rewritten[1]:.1f} GB" in page, (written, rewritten)
    assert f"{written[0]:.1f} to {rewritten[0]:.1f} TFLOP" in page, (written, rewritten)
    dropout = totals(results["rewritten, dropout"])
    assert f"{dropout[1]:.1f} GB with dropout" in page, dropout


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None or find_spec("triton") is None,
    reason="compiling for a pretended H200 needs Linux, gcc and triton",
)
def test_rewritten_blocks_have_no_casts_and_one_token_in_the_last_mlp(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    command = [sys.executable, str(ROOT / "bench" / "compiled_kernels.py"), "-json", str(file), "MODEL.DEPTH=2"]
    for name, words in (("written", ["SPEED=-rewrite"]), ("ours", [])):
        subprocess.run([*command, "-name", name, *words], check=True, capture_output=True, timeout=1000)
    results = json.loads(file.read_text(encoding="utf-8"))
    kernels = {name: result["kernels_of_some_blocks"] for name, result in results.items()}
    of_block = {name: [kernel for kernel in kernels[name] if "block 0" in kernel] for name in kernels}
    assert [name for name in of_block if any(": cast (" in kernel for kernel in of_block[name])] == ["written"]
    assert any(f"addmm {TOKENS} x 3072 by 3072 x 768" in kernel for kernel in of_block["ours"])
    last_mlp = [kernel for kernel in kernels["ours"] if "forward, block 1: product" in kernel and "3072" in kernel]
    assert [" 256 x 768 by 768 x 3072" in last_mlp[0], " 256 x 3072 by 3072 x 768" in last_mlp[1]] == [True, True]
    written = totals(results["written"])
    ours = totals(results["ours"])
    assert ours[0] < 0.8 * written[0]
    assert ours[1] < 0.8 * written[1]
