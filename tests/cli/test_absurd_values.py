"""Settings far out of range: one line says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import Vitamp

ABSURD = {
    "-amp fp16 AMP.INIT_LOSS_SCALING=1e308": "AMP.INIT_LOSS_SCALING: expected number > 0 and <= 3e+38, got 1e308",
    "THREADS=99999999999999": "THREADS: expected whole number >= 1 and <= 4096",
    "NGPUS=99999999999999": "NGPUS: expected whole number >= -1 and <= 1024",
    "DATA.NUM_WORKERS=99999999": "DATA.NUM_WORKERS: expected whole number >= 0 and <= 1024",
    "MODEL.DEPTH=99999999": "99,999,999 blocks; at most 10,000 are supported",
    "MODEL.EMBED_DIM=99999998": "The model has 119,999,999,999,999,962 weights, which take 447,034,836 GiB",
    "MODEL.NUM_CLASSES=99999999999": "The model has 1,700,000,003,663 weights",
    "DATA.IMAGE_SIZE=99999996": "The model has 9,999,999,200,003,802 weights",
    "DATA.BATCH_SIZE=99999999999999999999999": "not one full batch",
}


@pytest.mark.parametrize("words", ABSURD)
def test_absurd_setting_is_refused_at_once(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: str) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words.split(), code=2)
    assert ABSURD[words] in " ".join(done.err.split())
