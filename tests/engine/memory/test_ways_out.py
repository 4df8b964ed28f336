"""Ways out of an out-of-memory error: only those not in use yet, with the same images per update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.memory.out_of_memory import before_training, ways_out
from tests.engine.small import CPU
from utils.config import load_config

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ({"DATA.BATCH_SIZE": "15"}, "-batch_size 5 -accum_iter 3:"),
        ({"DATA.BATCH_SIZE": "32", "TRAIN.ACCUM_ITER": "3"}, "-batch_size 16 -accum_iter 6:"),
        ({"DATA.BATCH_SIZE": "32", "TRAIN.GLOBAL_BATCH": "64"}, "-batch_size 16:"),
        ({"DATA.BATCH_SIZE": "1", "TRAIN.GRAD_CHECKPOINT": "blocks"}, "-amp:"),
    ],
)
def test_ways_out_keep_the_images_of_an_update(tiny: Path, words: dict[str, str], first: str) -> None:
    assert ways_out(load_config(str(tiny), words=words).config, False, GPU)[0].startswith(first)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ({"DATA.BATCH_SIZE": "100"}, "-batch_size_eval 50:"),
        ({"DATA.BATCH_SIZE": "100", "DATA.BATCH_SIZE_EVAL": "60"}, "-batch_size_eval 30:"),
        ({"DATA.BATCH_SIZE_EVAL": "3"}, "-batch_size_eval 1:"),
        ({"DATA.BATCH_SIZE_EVAL": "1"}, "-amp:"),
    ],
)
def test_ways_out_of_a_validation_halve_its_own_batch(tiny: Path, words: dict[str, str], first: str) -> None:
    ways = ways_out(load_config(str(tiny), words=words).config, True, GPU)
    assert ways[0].startswith(first)
    assert not any("GRAD_CHECKPOINT" in way for way in ways), "a validation keeps nothing for a backward pass"


def test_ways_out_omit_what_is_in_use(tiny: Path) -> None:
    every = ways_out(load_config(str(tiny)).config, False, GPU)
    assert [way.partition(":")[0] for way in every] == [
        "-batch_size 16 -accum_iter 2",
        "TRAIN.GRAD_CHECKPOINT=blocks",
        "-amp",
        "-batch_size auto",
    ]
    done = {"TRAIN.GRAD_CHECKPOINT": "blocks", "AMP.ENABLED": "true"}
    left = ways_out(load_config(str(tiny), words=done).config, False, GPU, found=True)
    assert left == ["-batch_size 16 -accum_iter 2: the same images per update, fewer at once"]


@pytest.mark.parametrize("gains", [True, False])
def test_ways_out_before_the_first_update(tiny: Path, monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    """-amp is no way out on a CPU where it computes in fp32."""
    monkeypatch.setattr("engine.memory.out_of_memory.amp_may_gain", lambda _device: gains)
    smaller, fsdp = "a smaller MODEL.NAME or -batch_size", "DIST.STRATEGY=fsdp, which shards the weights"
    done = {"AMP.ENABLED": "true", "DIST.STRATEGY": "fsdp"}
    for words, ways in (({}, [*["-amp"] * gains, smaller, fsdp]), (done, [smaller])):
        told = before_training(torch.OutOfMemoryError(""), load_config(str(tiny), words=words).config, CPU)
        assert told.startswith("out of memory before the first update: ")
        lines = told.partition("Ways out:\n")[2].splitlines()
        assert [line.strip().removesuffix(" over several devices") for line in lines] == ways
