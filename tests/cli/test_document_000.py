"""The command lines of PaddleViT's page on mixed precision run on a small synthetic ImageNet."""

import re
from pathlib import Path

import pytest

from tests.program import Vitamp, metrics

# Added to the page's own flags, so that its model of 86 million parameters trains within a minute on a CPU.
SMALL = [
    *("MODEL.DEPTH=1", "MODEL.EMBED_DIM=32", "MODEL.NUM_HEADS=2", "DATA.IMAGE_SIZE=32", "DATA.NUM_WORKERS=1"),
    *("TRAIN.NUM_EPOCHS=1", "REPORT_FREQ=1", "THREADS=1", "DEVICE=cpu"),
]
EQUALS = "-cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012 -batch_size=8 -data_path={data} -amp"


@pytest.mark.parametrize(
    ("script", "words", "gpus", "updates"),
    [
        ("main_single_gpu.py", (), "0", 3),
        # 3 micro-batches: 2, and a last window of 1
        ("main_multi_gpu.py", ("-ngpus", 2), "0,1,2,3,4,5,6,7", 2),
    ],
)
def test_command_trains_in_mixed_precision_and_validates_all_images(
    vitamp: Vitamp, imagenet: Path, tmp_path: Path, script: str, words: tuple[object, ...], gpus: str, updates: int
) -> None:
    line, folder = EQUALS.format(data=imagenet).split(), tmp_path / "run"
    env = {"CUDA_VISIBLE_DEVICES": gpus}
    done = vitamp(*line, *words, "-output", folder, *SMALL, script=script, env=env, code=0)
    assert metrics(folder, "train")[-1]["update"] == updates
    (validated,) = metrics(folder, "val")
    assert validated["update"] == updates
    assert validated["acc1"] in [12.5 * hits for hits in range(9)]  # of 8 images, each counted once
    assert "8 validation images" in done.out
    # A CPU without 16-bit arithmetic computes in fp32, and says so.
    assert re.search("(bf16|fp16) by autocast|-amp computes in fp32 here", done.text)
    assert ("8 per device x 2 devices x 1 accumulated = 16" in done.out) == ("-ngpus" in words)
