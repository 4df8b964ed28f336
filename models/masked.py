"""Masked autoencoder (MODEL.MAE_PRETRAIN), which learns without labels (He et al. 2022, arXiv:2111.06377).

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
"""Name of the decoder module, with which the names of its weights begin"""
TEMPERATURE = 10_000.0
"""Longest wavelength of the fixed position embedding, relative to the shortest"""
EPSILON = 1e-6
"""Added to a variance before its square root"""


class Masked(NamedTuple):
    """The seen and the hidden patches of each image, by their numbers in the grid, row by row."""

    seen: Tensor
    """images x seen patches"""
    hidden: Tensor
    """images x hidden patches"""


class Decoder(nn.Module):
    """Predicts the pixels of the hidden patches from the encoder's output for the patches that it saw."""

    positions: Tensor
    """Embedding of each patch's position, patches x width"""

    def __init__(self, encoder_width: int, grid: tuple[int, int], values: int, config: DecoderConfig) -> None:
        """`grid`: rows and columns of patches. `values`: numbers to predict per patch, that is pixels x channels."""
        super().__init__()
        width = config.EMBED_DIM
        self.embed = nn.Linear(encoder_width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("positions", position_embedding(grid, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, config.NUM_HEADS, qkv_bias=True) for _ in range(config.DEPTH)))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.predict = nn.Linear(width, values)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, encoded: Tensor, masked: Masked) -> Tensor:
        """Predict the pixels of the hidden patches (images x hidden patches x values).

        `encoded`: the encoder's prefix tokens, then its tokens of the seen patches. `masked`: the numbers of the seen
        and of the hidden patches, each images x patches.
        """
        tokens = self.embed(encoded)
        hidden_count = masked.hidden.shape[1]
        prefix_count = tokens.shape[1] - masked.seen.shape[1]
        mask_tokens = self.mask_token.to(tokens.dtype).expand(len(tokens), hidden_count, -1)
        patch_numbers = torch.cat((masked.seen, masked.hidden), 1)
        positions = self.positions.to(tokens.dtype)[patch_numbers]
        # The patches need not be in the order of the grid, because attention does not depend on the order.
        patches = torch.cat((tokens[:, prefix_count:], mask_tokens), 1) + positions
        decoded = self.blocks(torch.cat((tokens[:, :prefix_count], patches), 1))
        return self.predict(self.norm(decoded[:, -hidden_count:]))


class MaskedAutoencoder(VisionTransformer):
    """A ViT that learns to predict hidden patches of images.

    It returns two numbers per image: the loss of the hidden patches, and the variance of their target.
    """

    decoder: Decoder
    mask_ratio: float
    """Fraction of the patches that are hidden"""

    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # no attention mask
        masked = self.mask(images)
        predicted = self.decoder(self.encode(images, masked), masked).float()
        target = self.target(images, masked.hidden)
        error = (predicted - target).square().mean((1, 2))
        return torch.stack((error, target.var(2, correction=0).mean(1)), 1)

    @torch.no_grad()
    def painted(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images with the hidden patches in grey (0), and the images with the predictions in their place.

        The model predicts normalised pixels. So each predicted patch gets the mean and standard deviation of the true
        patch.
        """
        masked = self.mask(images)
        normalised = self.decoder(self.encode(images, masked), masked).float()
        patches = self.patches(images.float())
        hidden_patches = tokens_at(patches, masked.hidden)
        variance, mean = torch.var_mean(hidden_patches, 2, keepdim=True)
        predicted = normalised * (variance + EPSILON).sqrt() + mean
        # `scatter` takes an index per value: the number of its patch.
        hidden_indices = masked.hidden[..., None].expand(-1, -1, patches.shape[2])
        with_grey = self.joined(patches.scatter(1, hidden_indices, 0.0))
        return with_grey, self.joined(patches.scatter(1, hidden_indices, predicted))

    def masking_words(self) -> str:
        """Describe the masking and the decoder for the banner."""
        width = self.decoder.embed.out_features
        depth = len(self.decoder.blocks)
        return f"{100 * self.mask_ratio:g} % of the patches hidden, decoder of width {width} and depth {depth}"

    def mask(self, images: Tensor) -> Masked:
        """Choose the patches to hide.

        In training, they are random for each image; random numbers are seeded for each micro-batch. In evaluation, they
        are the same in every image.
        """
        batch_size = len(images)
        patches = self.patch_embed.num_patches
        if self.training:
            noise = torch.rand(batch_size, patches, device=images.device)
        else:
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(1, patches, generator=generator).to(images.device).expand(batch_size, -1)
        order = noise.argsort(1)
        seen = round(patches * (1 - self.mask_ratio))
        seen = min(max(seen, 1), patches - 1)  # at least one patch is seen, and one hidden
        return Masked(seen=order[:, :seen], hidden=order[:, seen:])

    def encode(self, images: Tensor, masked: Masked) -> Tensor:
        """Compute the encoder's output for the seen patches alone: prefix tokens, then one token per seen patch.

        `masked.seen`: numbers of each image's seen patches in the grid.
        """
        images = images.to(self.decoder.embed.weight.dtype)  # O3 casts in the model's forward
        tokens = self._pos_embed(self.patch_embed(images))
        prefix_tokens = tokens[:, : self.num_prefix_tokens]
        patch_tokens = tokens[:, self.num_prefix_tokens :]
        seen_tokens = tokens_at(patch_tokens, masked.seen)
        return self.norm(self.blocks(self.norm_pre(torch.cat((prefix_tokens, seen_tokens), 1))))

    def target(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return the pixels to predict, in fp32, each patch normalised by its mean and standard deviation.

        `numbers`: the patches of each image, by their numbers in the grid.
        """
        target = tokens_at(self.patches(images.float()), numbers)
        variance, mean = torch.var_mean(target, 2, keepdim=True)
        return (target - mean) * (variance + EPSILON).rsqrt()

    def patches(self, images: Tensor) -> Tensor:
        """Cut images (B x C x H x W) into patches (B x patches x values)."""
        high, wide = self.patch_embed.patch_size
        rows, columns = self.patch_embed.grid_size
        cut = images.reshape(len(images), -1, rows, high, columns, wide)
        return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def joined(self, patches: Tensor) -> Tensor:
        """Join patches to images; the inverse of `patches`."""
        high, wide = self.patch_embed.patch_size
        rows, columns = self.patch_embed.grid_size
        pixels = patches.reshape(len(patches), rows, columns, high, wide, -1).permute(0, 5, 1, 3, 2, 4)
        return pixels.flatten(4).flatten(2, 3)


def tokens_at(tokens: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens (B x N x D) at the places `numbers` (B x K), which differ from image to image, as B x K x D."""
    return tokens.gather(1, numbers[..., None].expand(-1, -1, tokens.shape[2]))


def position_embedding(grid: tuple[int, int], width: int) -> Tensor:
    """Return the fixed position embedding (patches x width): sines and cosines of each patch's row and column.

    It has four equal quarters: sines of the column, cosines of the column, sines of the row, cosines of the row. So
    `width` must be divisible by 4. Within a quarter, the frequencies fall from 1 towards 1 / TEMPERATURE.
    """
    quarter = width // 4
    frequencies = TEMPERATURE ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    high, wide = grid
    rows, columns = torch.meshgrid(
        torch.arange(high, dtype=torch.float64), torch.arange(wide, dtype=torch.float64), indexing="ij"
    )
    waves = []
    for coordinates in (columns, rows):
        angles = coordinates.flatten()[:, None] * frequencies
        waves += [torch.sin(angles), torch.cos(angles)]
    return torch.cat(waves, 1).float()


def masked_autoencoder(vit: Any, model: ModelConfig) -> MaskedAutoencoder:
    """Turn timm's ViT, built without a classifier, into a masked autoencoder with a decoder, in place."""
    patch_high, patch_wide = vit.patch_embed.patch_size
    channels = vit.patch_embed.proj.weight.shape[1]
    values_per_patch = patch_high * patch_wide * channels
    for pooling in (vit.fc_norm, vit.attn_pool):
        if pooling:  # the masked autoencoder does not use it, and DDP would wait for its gradients
            pooling.requires_grad_(False)
    vit.__class__ = MaskedAutoencoder  # in place: its weights keep their names
    vit.decoder = Decoder(vit.embed_dim, vit.patch_embed.grid_size, values_per_patch, model.DECODER)
    vit.mask_ratio = model.MASK_RATIO
    return vit


def masking_problems(reference: nn.Module, model: ModelConfig) -> list[str]:
    """Explain why this model cannot be the encoder, or why the decoder's sizes do not fit; empty if all is well.

    `reference`: timm's model of MODEL.NAME. A hybrid is a ViT whose patches are the output of convolutions.
    """
    problems = []
    is_vit = type(reference) is VisionTransformer
    has_plain_patches = type(getattr(reference, "patch_embed", None)) is PatchEmbed
    is_plain_vit = is_vit and has_plain_patches and "PATCH_SIZE" in sizes_of(reference)
    if not is_plain_vit:
        kind = "hybrid" if is_vit else type(reference).__name__
        problems.append(f"MODEL.MAE_PRETRAIN: needs a plain ViT as encoder; {model.NAME} is a {kind}")
    width = model.DECODER.EMBED_DIM
    heads = model.DECODER.NUM_HEADS
    if width % heads or width % 4:
        problems.append(f"MODEL.DECODER.EMBED_DIM {width}: must be divisible by 4 and by DECODER.NUM_HEADS {heads}")
    return problems
