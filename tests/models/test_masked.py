"""Masked autoencoders, against plain computations of their own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.build import build_model
from models.masked import MaskedAutoencoder
from utils.config import load_config
from utils.errors import UserError

SIZES = {"MODEL.PATCH_SIZE": "4", "MODEL.EMBED_DIM": "24", "MODEL.DEPTH": "2", "MODEL.NUM_HEADS": "2"}
DECODER = {"MODEL.DECODER.EMBED_DIM": "16", "MODEL.DECODER.DEPTH": "1", "MODEL.DECODER.NUM_HEADS": "2"}
WORDS = {"MODEL.MAE_PRETRAIN": "true", "DATA.IMAGE_SIZE": "16", **SIZES, **DECODER}


def build(**words: str) -> MaskedAutoencoder:
    config = load_config(words={**WORDS, **words}).config
    torch.manual_seed(1)
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, 3)
    assert isinstance(model, MaskedAutoencoder)
    return model.double()


def attention(block: Any, x: Tensor) -> Tensor:
    size, count, width = x.shape
    heads = block.attn.num_heads
    q, k, v = block.attn.qkv(x).reshape(size, count, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
    return block.attn.proj((weights @ v).transpose(1, 2).reshape(size, count, width))


def through(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + attention(block, block.norm1(x))
        x = x + block.mlp.fc2(torch.nn.functional.gelu(block.mlp.fc1(block.norm2(x))))
    return x


def loss_by_hand(model: MaskedAutoencoder, image: Tensor, seen: list[int], hidden: list[int]) -> Tensor:
    """Of one image, patch by patch."""
    cut = [image[:, y : y + 4, x : x + 4] for y in range(0, 16, 4) for x in range(0, 16, 4)]
    kernel, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
    embedded = [torch.einsum("chw,dchw->d", patch, kernel) + bias for patch in cut]
    assert model.pos_embed is not None
    assert model.cls_token is not None
    position = model.pos_embed[0]
    tokens = [model.cls_token[0, 0] + position[0], *(embedded[n] + position[n + 1] for n in seen)]
    encoded = model.norm(through(model.blocks, torch.stack(tokens)[None]))
    decoder = model.decoder
    short = decoder.embed(encoded)[0]
    all_patches: list[Tensor] = [decoder.mask_token[0, 0]] * 16
    for row, number in enumerate(seen, start=1):
        all_patches[number] = short[row]
    all_patches = [patch + decoder.positions[n] for n, patch in enumerate(all_patches)]
    decoded = decoder.predict(decoder.norm(through(decoder.blocks, torch.stack([short[0], *all_patches])[None])))[0]
    errors = []
    for number in hidden:
        pixels = cut[number].permute(1, 2, 0).flatten().float()
        target = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
        errors.append((decoded[number + 1].float() - target).square().mean())
    return torch.stack(errors).mean()


def test_loss_and_gradients_are_those_of_a_plain_computation() -> None:
    model = build().train()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.manual_seed(5)
    loss = model(images)[:, 0].mean()
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    seen, hidden = model.mask(images)
    assert (seen.shape, hidden.shape) == ((3, 4), (3, 12))
    assert all(sorted(row) == list(range(16)) for row in torch.cat((seen, hidden), 1).tolist())
    rows = zip(images, seen.tolist(), hidden.tolist(), strict=True)
    by_hand = torch.stack([loss_by_hand(model, *row) for row in rows]).mean()
    by_hand.backward()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)  # the loss is in fp32
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            found[name], weight.grad, rtol=1e-4, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_hidden_patches_do_not_reach_the_encoder() -> None:
    model = build().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    counts: list[int] = []
    model.blocks[0].register_forward_hook(lambda _module, inputs, _output: counts.append(inputs[0].shape[1]))
    masked = model.mask(images)
    before = model.encode(images, masked)
    places = masked.hidden[..., None].expand(-1, -1, 48)
    changed = model.joined(model.patches(images).scatter(1, places, 7.0))
    assert not torch.equal(changed, images)
    assert torch.equal(model.encode(changed, masked), before)
    assert counts == [1 + 4, 1 + 4]


def test_masks_are_drawn_in_training_and_equal_in_evaluation() -> None:
    model = build()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    drawn = model.train().mask(images).seen
    assert len({tuple(row) for row in drawn.tolist()}) > 1
    kept = model.eval().mask(images).seen
    assert len({tuple(row) for row in kept.tolist()}) == 1
    assert torch.equal(kept[:1], model.mask(images[:1]).seen)


def test_second_number_is_the_variance_of_the_target() -> None:
    model = build().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    target = model.target(images, model.mask(images).hidden)
    expected = target.var(2, correction=0).mean(1)
    torch.testing.assert_close(model(images)[:, 1], expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"MODEL.NAME": "resnet18"}, "needs a plain ViT as encoder; resnet18 is a ResNet"),
        ({"MODEL.NAME": "deit_tiny_distilled_patch16_224"}, "is a VisionTransformerDistilled"),
        ({"MODEL.NAME": "vit_tiny_r_s16_p8_224"}, "needs a plain ViT as encoder; vit_tiny_r_s16_p8_224 is a hybrid"),
        ({"MODEL.DECODER.EMBED_DIM": "30"}, "MODEL.DECODER.EMBED_DIM 30: must be divisible by 4"),
    ],
)
def test_models_that_cannot_be_masked_are_refused(words: dict[str, str], message: str) -> None:
    config = load_config(words={"MODEL.MAE_PRETRAIN": "true", **words}).config
    with pytest.raises(UserError, match=message):
        build_model(config.MODEL, 224, 3)
