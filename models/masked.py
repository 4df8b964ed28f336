"""MODEL.MAE_PRETRAIN: a masked autoencoder, which learns without labels (He et al. 2022, arXiv:2111.06377).

The encoder is timm's ViT, with timm's names of its weights, and computes only the patches that are not masked. The
names of the decoder's weights begin with `decoder.`: fine-tuning leaves them out.
"""

from typing import Any, NamedTuple

import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from models.sizes import sizes_of
from utils.config.model import DecoderConfig, ModelConfig

DECODER = "decoder"
"""Name of the module, with which the names of its weights begin"""
TEMPERATURE = 10_000.0
"""Of the fixed position embedding: its longest wavelength, relative to the shortest"""
EPSILON = 1e-6


class Masked(NamedTuple):
    """Patches by their number, per image."""

    seen: Tensor
    """B x K"""
    hidden: Tensor
    """B x M"""


class Decoder(nn.Module):
    """Predicts the pixels of all patches from the encoder's output for those that it saw."""

    positions: Tensor

    def __init__(self, width: int, grid: tuple[int, int], values: int, config: DecoderConfig) -> None:
        """`width`: of the encoder. `values`: of a patch."""
        super().__init__()
        own = config.EMBED_DIM
        self.embed = nn.Linear(width, own)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, own))
        self.register_buffer("positions", position_embedding(grid, own), persistent=False)
        self.blocks = nn.Sequential(*(Block(own, config.NUM_HEADS, qkv_bias=True) for _ in range(config.DEPTH)))
        self.norm = nn.LayerNorm(own, eps=EPSILON)
        self.predict = nn.Linear(own, values)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, encoded: Tensor, masked: Masked) -> Tensor:
        """`encoded`: prefix tokens, then the seen patches. Returns the values of the hidden patches."""
        tokens = self.embed(encoded)
        prefix = tokens.shape[1] - masked.seen.shape[1]
        unknown = self.mask_token.to(tokens.dtype).expand(len(tokens), masked.hidden.shape[1], -1)
        places = self.positions.to(tokens.dtype)[torch.cat((masked.seen, masked.hidden), 1)]
        patches = torch.cat((tokens[:, prefix:], unknown), 1) + places  # attention does not depend on their order
        decoded = self.blocks(torch.cat((tokens[:, :prefix], patches), 1))
        return self.predict(self.norm(decoded[:, -masked.hidden.shape[1] :]))


class MaskedAutoencoder(VisionTransformer):
    """Returns two numbers per image: the loss of its masked patches, and the variance of their target."""

    decoder: Decoder
    mask_ratio: float

    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # no attention mask
        masked = self.mask(images)
        predicted = self.decoder(self.encode(images, masked), masked).float()
        target = self.target(images, masked.hidden)
        error = (predicted - target).square().mean((1, 2))
        return torch.stack((error, target.var(2, correction=0).mean(1)), 1)

    @torch.no_grad()
    def painted(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """`images` with hidden patches in grey (0), and with what the model predicts there.

        A predicted patch gets the mean and deviation of the true one, which the model is not asked for.
        """
        masked = self.mask(images)
        predicted = self.decoder(self.encode(images, masked), masked).float()
        patches = self.patches(images.float())
        variance, mean = torch.var_mean(chosen(patches, masked.hidden), 2, keepdim=True)
        predicted = predicted * (variance + EPSILON).sqrt() + mean
        places = masked.hidden[..., None].expand(-1, -1, patches.shape[2])
        hidden = self.joined(patches.scatter(1, places, 0.0))
        return hidden, self.joined(patches.scatter(1, places, predicted))

    def masking_words(self) -> str:
        """For the banner."""
        width = self.decoder.embed.out_features
        depth = len(self.decoder.blocks)
        return f"{100 * self.mask_ratio:g} % of the patches hidden, decoder of width {width} and depth {depth}"

    def mask(self, images: Tensor) -> Masked:
        """The patches to hide: in training by random numbers, which are seeded for each micro-batch; in evaluation
        the same ones in every image."""
        size = len(images)
        patches = self.patch_embed.num_patches
        if self.training:
            noise = torch.rand(size, patches, device=images.device)
        else:
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(1, patches, generator=generator).to(images.device).expand(size, -1)
        order = noise.argsort(1)
        kept = min(max(round(patches * (1 - self.mask_ratio)), 1), patches - 1)
        return Masked(seen=order[:, :kept], hidden=order[:, kept:])

    def encode(self, images: Tensor, masked: Masked) -> Tensor:
        images = images.to(self.decoder.embed.weight.dtype)  # O3 casts in the model's forward
        tokens = self._pos_embed(self.patch_embed(images))
        prefix = tokens[:, : self.num_prefix_tokens]
        patches = tokens[:, self.num_prefix_tokens :]
        tokens = torch.cat((prefix, chosen(patches, masked.seen)), 1)
        return self.norm(self.blocks(self.norm_pre(tokens)))

    def target(self, images: Tensor, numbers: Tensor) -> Tensor:
        """The pixels of these patches in fp32, normalised by the mean and standard deviation of each patch."""
        target = chosen(self.patches(images.float()), numbers)
        variance, mean = torch.var_mean(target, 2, keepdim=True)
        return (target - mean) * (variance + EPSILON).rsqrt()

    def patches(self, images: Tensor) -> Tensor:
        """B x C x H x W -> B x patches x values."""
        high, wide = self.patch_embed.patch_size
        rows, columns = self.patch_embed.grid_size
        cut = images.reshape(len(images), -1, rows, high, columns, wide)
        return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def joined(self, patches: Tensor) -> Tensor:
        """The inverse of `patches`."""
        high, wide = self.patch_embed.patch_size
        rows, columns = self.patch_embed.grid_size
        pixels = patches.reshape(len(patches), rows, columns, high, wide, -1).permute(0, 5, 1, 3, 2, 4)
        return pixels.flatten(4).flatten(2, 3)


def chosen(tokens: Tensor, numbers: Tensor) -> Tensor:
    """B x N x D, of each image those with these numbers."""
    return tokens.gather(1, numbers[..., None].expand(-1, -1, tokens.shape[2]))


def position_embedding(grid: tuple[int, int], width: int) -> Tensor:
    """Sines and cosines of each patch's row and column, patches x width; `width` is divisible by 4."""
    rates = TEMPERATURE ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    high, wide = grid
    rows, columns = torch.meshgrid(
        torch.arange(high, dtype=torch.float64), torch.arange(wide, dtype=torch.float64), indexing="ij"
    )
    waves = []
    for places in (columns, rows):
        angles = places.flatten()[:, None] * rates
        waves += [torch.sin(angles), torch.cos(angles)]
    return torch.cat(waves, 1).float()


def masked_autoencoder(vit: Any, model: ModelConfig) -> MaskedAutoencoder:
    """Make timm's ViT, built without a classifier, the encoder of a masked autoencoder."""
    high, wide = vit.patch_embed.patch_size
    values = high * wide * vit.patch_embed.proj.weight.shape[1]
    for pooling in (vit.fc_norm, vit.attn_pool):
        if pooling:  # not used now: DDP would wait for its gradients
            pooling.requires_grad_(False)
    vit.__class__ = MaskedAutoencoder
    vit.decoder = Decoder(vit.embed_dim, vit.patch_embed.grid_size, values, model.DECODER)
    vit.mask_ratio = model.MASK_RATIO
    return vit


def masking_problems(reference: nn.Module, model: ModelConfig) -> list[str]:
    """Why this model cannot be the encoder."""
    problems = []
    is_vit = type(reference) is VisionTransformer
    has_plain_patches = type(getattr(reference, "patch_embed", None)) is PatchEmbed
    if not (is_vit and has_plain_patches) or "PATCH_SIZE" not in sizes_of(reference):
        kind = "hybrid" if is_vit else type(reference).__name__
        problems.append(f"MODEL.MAE_PRETRAIN: needs a plain ViT as encoder; {model.NAME} is a {kind}")
    width = model.DECODER.EMBED_DIM
    heads = model.DECODER.NUM_HEADS
    if width % heads or width % 4:
        problems.append(f"MODEL.DECODER.EMBED_DIM {width}: must be divisible by 4 and by DECODER.NUM_HEADS {heads}")
    return problems
