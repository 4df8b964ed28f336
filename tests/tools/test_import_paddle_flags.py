"""The last line of export.py for PaddleViT's weights has flags that build the imported model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models import build_model
from models.weights.fit import load_pretrained
from tests.tools.paddle_files import BLOCKS, MODELS, TODAY, VIT, of_paddle, random_weights, write
from tools.export.command import main
from utils.cli import parse
from utils.config import load_config


def grey() -> tuple[nn.Module, Any]:
    model = random_weights(VisionTransformer(**VIT, in_chans=1))
    return model, of_paddle(model, TODAY, BLOCKS)


@pytest.mark.parametrize("kind", ["vit", "distilled", "swin", "grey"])
def test_flags_in_the_last_line_build_the_model(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, arrays = (grey if kind == "grey" else MODELS[kind])()
    file = write(tmp_path / "my weights.pdparams", arrays)
    assert main([str(file), "-to", "safetensors"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    line = last[last.index("-pretrained") :]
    assert not re.search(r"(^| )[^' ]*\[", line), "a shell would expand it"
    words = [word.replace("NUM_HEADS=N", "NUM_HEADS=3") for word in shlex.split(line)]
    command = parse(words, "main_single_gpu.py")
    config = load_config(None, command.flags, command.words).config
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    load_pretrained(model, str(config.MODEL.PRETRAINED), config.MODEL.NAME)
    saved = source.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert len(model.state_dict()) == len(saved)
