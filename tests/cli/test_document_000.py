"""The command lines of PaddleViT's page on mixed precision run on a small synthetic ImageNet."""

from __future__ import annotations

import re
from pathlib import Path

from tests.program import Result, Vitamp, metrics

# Added to the page's own flags, so that its model of 86 million parameters trains within a minute on a CPU.
SMALL = [
    *("MODEL.DEPTH=1", "MODEL.EMBED_DIM=32", "MODEL.NUM_HEADS=2", "DATA.IMAGE_SIZE=32", "DATA.NUM_WORKERS=1"),
    *("TRAIN.NUM_EPOCHS=1", "REPORT_FREQ=1", "THREADS=1", "DEVICE=cpu"),
]
EQUALS = "-cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012 -batch_size=8 -data_path={data} -amp"


def trained(result: Result, folder: Path, updates: int) -> None:
    """Assert that it made so many updates in mixed precision, and validated all images."""
    assert metrics(folder, "train")[-1]["update"] == updates
    (validated,) = metrics(folder, "val")
    assert validated["update"] == updates
    assert validated["acc1"] in [12.5 * hits for hits in range(9)]  # of 8 images, each counted once
    assert "8 validation images" in result.out
    # A CPU without 16-bit arithmetic computes in fp32, and says so.
    assert re.search("(bf16|fp16) by autocast|-amp computes in fp32 here", result.text)


def test_single_gpu_command_trains(vitamp: Vitamp, imagenet: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = vitamp(
        *EQUALS.format(data=imagenet).split(), "-output", folder, *SMALL, env={"CUDA_VISIBLE_DEVICES": "0"}, code=0
    )
    trained(done, folder, updates=3)


def test_multi_gpu_command_trains(vitamp: Vitamp, imagenet: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = vitamp(
        *EQUALS.format(data=imagenet).split(),
        *("-ngpus", 2, "-output", folder, *SMALL),
        script="main_multi_gpu.py",
        env={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        code=0,
    )
    trained(done, folder, updates=2)  # 3 micro-batches: 2, and a last window of 1
    assert "8 per device x 2 devices x 1 accumulated = 16" in done.out
