"""A ViT that is rewritten for the compiler computes the same, with a smaller last MLP and fewer saved tensors."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, fx, nn

from engine.compile.fewer_bytes import SaveResiduals, rewrite_blocks

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
IMAGES = 3
TOKENS = 5


def vit(**changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**{**SIZES, **changes}).double()


def rows_of_products(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Logits, gradients, and the rows of each linear layer of a model that is compiled as far as its graph."""
    rows: list[int] = []

    def backend(graph: fx.GraphModule, _inputs: list[Tensor]) -> fx.GraphModule:
        for node in graph.graph.nodes:
            if node.target is F.linear:
                rows.append(node.meta["example_value"].shape[:-1].numel())
        return graph

    torch.compiler.reset()
    torch.manual_seed(1)
    logits = torch.compile(model, backend=backend, fullgraph=True)(images)
    logits.square().sum().backward()
    return logits, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, rows


@pytest.mark.parametrize("changes", [{}, {"drop_path_rate": 0.4, "init_values": 0.5, "reg_tokens": 2}])
def test_rewritten_vit_computes_the_same_with_one_token_in_its_last_mlp(changes: dict[str, Any]) -> None:
    images = torch.randn(IMAGES, 3, 16, 16, dtype=torch.float64)
    written = vit(**changes)
    ours = copy.deepcopy(written)
    rewrite_blocks(ours, fp8=False)
    logits, gradients, rows = rows_of_products(written, images)
    our_logits, our_gradients, our_rows = rows_of_products(ours, images)
    torch.testing.assert_close(our_logits, logits)
    assert [*our_gradients] == [*gradients] == [*dict(written.named_parameters())]
    torch.testing.assert_close(our_gradients, gradients)
    tokens = IMAGES * (TOKENS + changes.get("reg_tokens", 0))
    # qkv, proj, fc1 and fc2 of two blocks, and the classifier.
    assert rows == [tokens] * 8 + [IMAGES]
    assert our_rows == [tokens] * 6 + [IMAGES] * 3


def test_eager_and_evaluated_vits_are_not_changed_by_the_rewriting() -> None:
    images = torch.randn(IMAGES, 3, 16, 16, dtype=torch.float64)
    written = vit()
    ours = copy.deepcopy(written)
    rewrite_blocks(ours, fp8=False)
    assert torch.equal(ours(images), written(images))
    assert [type(block).__name__ for block in ours.blocks] == ["Block", "Block"]
    written.eval()
    ours.eval()
    features = torch.compile(ours.forward_features, backend="eager", fullgraph=True)(images)
    torch.testing.assert_close(features, written.forward_features(images))


@pytest.mark.parametrize(
    ("changes", "fp8"),
    [({"global_pool": "avg"}, False), ({"proj_drop_rate": 0.1}, False), ({}, True)],
    ids=["all tokens are read", "dropout", "fp8"],
)
def test_last_mlp_computes_all_tokens_where_one_would_not_do(changes: dict[str, Any], fp8: bool) -> None:
    model = vit(**changes)
    rewrite_blocks(model, fp8)
    assert not any(block.class_token_only for block in model.blocks)


def test_hook_on_the_last_mlp_sees_all_tokens() -> None:
    model = vit()
    last: Any = model.blocks[-1]
    last.mlp.register_forward_hook(lambda *_: None)
    rewrite_blocks(model, fp8=False)
    assert not last.class_token_only


def test_blocks_with_a_forward_of_their_own_stay() -> None:
    model = vit()
    block: Any = model.blocks[0]
    block.forward = lambda x: x
    rewrite_blocks(model, fp8=False)
    assert not hasattr(model.blocks[1], "class_token_only")


def saved(passes: list[Any]) -> list[str]:
    """Operators of the forward pass whose results, one per token and column, are saved for the backward pass."""
    from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
    from torch._inductor.decomposition import select_decomp_table

    names: list[str] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        for one in passes:
            one(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        results: Any = forward.graph.output_node().args[0]
        for node in results:
            if isinstance(node, fx.Node) and node.op == "call_function" and node.meta["val"].shape == (IMAGES, 32):
                names.append(str(node.target).removeprefix("aten."))
        return forward, backward

    def blocks(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.linear(F.layer_norm(x, (32,)), weight)
        return x

    function = aot_function(blocks, nop, nop, partition_fn=partition, decompositions=select_decomp_table())
    function(torch.randn(IMAGES, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True))
    return names


def test_residuals_are_saved_in_place_of_normalised_tokens() -> None:
    assert saved([]).count("mul.Tensor") == 3
    assert "mul.Tensor" not in saved([SaveResiduals()])
    assert len(saved([SaveResiduals()])) < len(saved([]))
