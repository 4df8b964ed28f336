"""Token drop and size schedule: fewer patches and several image sizes with the weights of the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.inputs.by_epoch import TokenDrop
from models.build import build_model, check_model
from models.sizes import Shortcuts
from utils.config.model import ModelConfig
from utils.config.train import TrainConfig
from utils.errors import UserError

TINY: dict[str, Any] = {"NUM_CLASSES": 10, "PATCH_SIZE": 4, "EMBED_DIM": 16, "DEPTH": 2, "NUM_HEADS": 2}
SIDE, PATCHES = 32, 64


def tiny(shortcuts: Shortcuts, name: str = "tiny", **settings: Any) -> Any:
    torch.manual_seed(0)
    return build_model(ModelConfig(**{"NAME": name, **TINY, **settings}), SIDE, 3, shortcuts)


def tokens_of(model: Any, images: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model(images)
    handle.remove()
    return seen[0]


def images(count: int = 4, side: int = SIDE) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def training(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"NUM_EPOCHS": 10, **settings})


def kept_patches(model: Any) -> list[set[int]]:
    """Patches among the tokens of each sample, found by comparison with the plain model's tokens."""
    plain = tokens_of(tiny(Shortcuts()).eval(), images())
    found = tokens_of(model, images())
    return [
        {patch for patch in range(PATCHES) if any(torch.equal(token, row[patch + 1]) for token in sample[1:])}
        for sample, row in zip(found, plain, strict=True)
    ]


def test_token_drop_drops_a_fraction_per_sample() -> None:
    model = tiny(Shortcuts(token_drop=0.25)).train()
    TokenDrop(training(TOKEN_DROP=0.25)).enter(1, model)
    kept = kept_patches(model)
    assert [len(patches) for patches in kept] == [48] * 4
    assert len({frozenset(patches) for patches in kept}) == 4


@pytest.mark.parametrize(("name", "prefix"), [("tiny", 1), ("deit_tiny_distilled_patch16_224", 2)])
def test_token_drop_keeps_the_class_and_distillation_tokens(name: str, prefix: int) -> None:
    model = tiny(Shortcuts(token_drop=0.5), name).train()
    TokenDrop(training(TOKEN_DROP=0.5)).enter(1, model)
    found, expected = tokens_of(model, images()), tokens_of(tiny(Shortcuts(), name).eval(), images())
    assert found.shape[1] == prefix + PATCHES // 2
    assert torch.equal(found[:, :prefix], expected[:, :prefix])


def test_validation_sees_all_patches() -> None:
    model = tiny(Shortcuts(token_drop=0.5))
    TokenDrop(training(TOKEN_DROP=0.5)).enter(1, model)
    with torch.no_grad():
        assert torch.equal(model.eval()(images()), tiny(Shortcuts()).eval()(images()))


def test_token_drop_is_off_in_the_last_epochs() -> None:
    model = tiny(Shortcuts(token_drop=0.5)).train()
    drop = TokenDrop(training(TOKEN_DROP=0.5, TOKEN_DROP_TAIL=2))
    counts = []
    for epoch in (8, 9, 10, 1):
        drop.enter(epoch, model)
        counts.append(tokens_of(model, images()).shape[1] - 1)
    assert counts == [32, 64, 64, 32]


def test_size_schedule_model_accepts_smaller_images() -> None:
    model = tiny(Shortcuts(sizes=(16,))).eval()
    with torch.no_grad():
        assert model(images(side=16)).shape == (4, 10)
        torch.testing.assert_close(model(images()), tiny(Shortcuts()).eval()(images()), rtol=1e-6, atol=1e-6)
    loss = model.train()(images(side=16)).sum()
    loss.backward()
    assert model.pos_embed.grad.abs().sum(-1).count_nonzero() == 1 + PATCHES, "all positions learn from small images"


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet18"])
@pytest.mark.parametrize(
    ("key", "shortcuts"), [("TOKEN_DROP", Shortcuts(token_drop=0.5)), ("SIZE_SCHEDULE", Shortcuts(sizes=(112,)))]
)
def test_token_drop_and_size_schedule_refuse_other_models(name: str, key: str, shortcuts: Shortcuts) -> None:
    with pytest.raises(
        UserError, match=rf"TRAIN\.{key}: (SwinTransformer|ResNet) does not support it\. .*ViT"
    ) as error:
        check_model(ModelConfig(NAME=name), 224, 3, shortcuts)
    assert len(str(error.value).splitlines()) == 2, "and nothing else is said"
