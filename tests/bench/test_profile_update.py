"""bench/profile_update.py: kernels of a trace are grouped, and their work is computed from shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_table
from bench.kernel_groups import (
    BACKWARD,
    CLIPPING,
    COPIES,
    EMA,
    FORWARD,
    H200,
    LOSS,
    METRICS,
    OPTIMISER,
    OTHER,
    POINTWISE,
    PRODUCTS,
    Operator,
    Record,
    grouped,
    idle,
    place,
    records_of,
)
from bench.profile_update import main, sentence, table
from utils.errors import EXIT_DONE, EXIT_FAILED

HALF = ["c10::BFloat16"] * 2
NVJET = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
SDPA = "cudnn_generated_fort_native_sdpa_sm90_flash_"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (NVJET, PRODUCTS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::args)", PRODUCTS),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>", FORWARD),
        (f"{SDPA}fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", FORWARD),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", FORWARD),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", BACKWARD),
        (f"{SDPA}bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0", BACKWARD),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>(float*)", BACKWARD),
        ("triton_per_fused_native_layer_norm_native_layer_norm_backward_1", POINTWISE),
        ("triton_poi_fused__to_copy_12", POINTWISE),
        ("triton_red_fused__log_softmax__to_copy_12", LOSS),
        (f"{FOREACH}FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", OPTIMISER),
        (f"{FOREACH}TensorListMetadata<2>, TernaryOpScalarFunctor<float, 2>, LerpFunctor<float>>", EMA),
        (f"{FOREACH}TensorListMetadata<1>, LpNormFunctor<float, (NormType)1, float, 1, 1, 0>>", CLIPPING),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("Memset (Device)", COPIES),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>", COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", POINTWISE),
        ("some_kernel_of_next_year", OTHER),
    ],
)
def test_names_of_an_h200_have_their_group(name: str, group: str) -> None:
    assert place(Record(name, (), 0.0, 1.0, 7))[0] == group


def product_of(call: int, batch: int = 256 * 197, width: int = 768, wide: int = 2304) -> Operator:
    return Operator("aten::mm", [[batch, width], [width, wide]], HALF, call)


def test_product_is_compared_with_the_peak() -> None:
    """Two kernels of one call are one product; twice its shortest time is half of the peak."""
    flops = 2 * 256 * 197 * 768 * 2304
    shortest = 1e6 * flops / H200.flops
    operators = (product_of(1),)
    records = [
        Record(NVJET, operators, 0.0, 1.5 * shortest, 7),
        Record("void cublasLt::splitKreduce_kernel<32>", operators, 1.5 * shortest, 0.5 * shortest, 7),
    ]
    entry = grouped(records, 1, 86_000_000, H200)
    (row,) = entry["rows"]
    assert row["what"] == "50432 x 2304 x 768"
    assert (row["calls"], row["flops"]) == (1, flops)
    assert row["bytes"] == 2 * (50432 * 768 + 768 * 2304 + 50432 * 2304)
    assert row["percent_of_peak"] == pytest.approx(50)
    assert row["saves_ms"] == pytest.approx(shortest / 1000)
    assert f"Of {2 * shortest / 1000:.1f} ms an update (50 % of the peak), " in sentence(entry)


def test_narrow_product_is_bound_by_memory() -> None:
    operators = (product_of(1, width=8, wide=8),)
    (row,) = grouped([Record(NVJET, operators, 0.0, 100.0, 7)], 1, 1, H200)["rows"]
    assert row["perfect_ms"] == pytest.approx(1000 * 2 * (2 * 50432 * 8 + 64) / H200.bandwidth)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    qkv = [256, 197, 3 * 768]
    forward = Operator("vitamp::packed_attention", [qkv, []], ["c10::BFloat16", "Scalar"], 1)
    backward = Operator("vitamp::packed_attention_backward", [[256, 197, 768], qkv], HALF, 2)
    records = [Record("forward_kernel", (forward,), 0, 9, 7), Record("backward_kernel", (backward,), 9, 20, 7)]
    groups = {group["group"]: group for group in grouped(records, 1, 1, H200)["groups"]}
    one_product = 2 * 256 * 12 * 197 * 197 * 64
    assert groups[FORWARD]["flops"] == 2 * one_product
    assert groups[BACKWARD]["flops"] == 5 * one_product
    assert groups[FORWARD]["bytes"] == 2 * 4 * 256 * 197 * 768


def test_unknown_work_stays_unknown() -> None:
    """No number is made up for a product without shapes, for single precision, and for a device without peaks."""
    bare = Record(NVJET, (), 0.0, 10.0, 7)
    single = Record(NVJET, (Operator("aten::mm", [[4, 8], [8, 2]], ["float", "float"], 1),), 10.0, 10.0, 7)
    rows = {row["what"]: row for row in grouped([bare, single], 1, 1, H200)["rows"]}
    assert rows["shape unknown"]["flops"] is None
    assert rows["shape unknown"]["perfect_ms"] is None
    assert rows["4 x 2 x 8"]["flops"] == 128
    assert rows["4 x 2 x 8"]["saves_ms"] is None
    entry = grouped([Record(NVJET, (product_of(1),), 0.0, 10.0, 7)], 1, 1, None)
    assert json.loads(json.dumps(entry))["rows"][0]["percent_of_peak"] is None
    assert any(line.split()[:2] == ["matrix", "products"] and " - " in line for line in table(entry))


def test_gaps_are_the_time_without_any_kernel() -> None:
    """Kernels that overlap on two streams cover time once; one inside another ends no gap."""
    assert idle([(0, 4), (1, 2), (3, 6), (9, 10)], 0, 12) == [(6, 9), (10, 12)]
    spans = [(0.0, 4000.0, 7), (1000.0, 1000.0, 8), (3000.0, 3000.0, 8), (9000.0, 1000.0, 7)]
    entry = grouped([Record(NVJET, (), *span) for span in spans], 2, 1, H200)
    assert (entry["ms"], entry["gap_ms"], entry["overlap_ms"]) == (5.0, 1.5, 1.0)


def host(name: str, start: float, duration: float, cat: str = "cpu_op", tid: int = 1, args: Any = None) -> Any:
    about = args or {}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": about}


def on_device(name: str, start: float, duration: float, correlation: int, external: int, cat: str = "kernel") -> Any:
    numbers = {"External id": external, "correlation": correlation, "stream": 7, "device": 0}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration, "args": numbers}


def test_kernels_of_a_trace_have_what_launched_them() -> None:
    """By the launch's correlation, or by the operator's id where the launch is not in the trace."""
    shapes = {"Input Dims": [[64, 8], [8, 16]], "Input type": HALF}
    operands = {"Input Dims": [[64, 16], [64, 16], []], "Input type": [*HALF, "Scalar"]}
    triton = "triton_poi_fused_gelu_3"
    events = [
        host("ProfilerStep#2", 0, 100, "user_annotation"),
        host("aten::linear", 1, 9, args={"External id": 1}),
        host("aten::mm", 2, 7, args={"External id": 2, **shapes}),
        host("cudaLaunchKernelExC", 3, 1, "cuda_runtime", args={"correlation": 50}),
        host(triton, 11, 3, args={"External id": 3, **operands}),
        host("cuLaunchKernelEx", 12, 1, "cuda_driver", args={"correlation": 51}),
        host("update.clip_gradients", 20, 10, "user_annotation"),
        host("aten::_foreach_mul_", 21, 5, args={"External id": 4}),
        host("cudaLaunchKernel", 22, 1, "cuda_runtime", args={"correlation": 52}),
        host("Ema.after_update", 40, 10, "user_annotation", tid=2),
        host("aten::_foreach_lerp_", 41, 5, tid=2, args={"External id": 5}),
        on_device(NVJET, 10, 5, 50, 0),
        on_device(triton, 16, 2, 51, 3),
        on_device(f"{FOREACH}TensorListMetadata<1>, BinaryOpScalarTensorFunctor<float>>", 30, 6, 52, 4),
        on_device("void at::native::elementwise_kernel<128>", 50, 4, 53, 5),
        {**on_device("Ema.after_update", 50, 4, 0, 0), "cat": "gpu_user_annotation"},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    ]
    entry = grouped(records_of(events, of_gpu=True), 1, 1000, H200)
    rows = {row["group"]: row for row in entry["rows"]}
    assert {group: row["ms"] for group, row in rows.items()} == {
        PRODUCTS: 5e-3,
        POINTWISE: 2e-3,
        CLIPPING: 6e-3,
        EMA: 4e-3,
    }
    assert rows[PRODUCTS]["what"] == "64 x 16 x 8"
    assert rows[POINTWISE]["what"] == "triton_poi_fused_gelu"
    assert rows[POINTWISE]["bytes"] == 2 * 2 * 64 * 16
    assert rows[EMA]["bytes"] == 12 * 1000


def test_operators_of_a_cpu_count_without_those_inside() -> None:
    events = [
        host("aten::linear", 0, 10),
        host("aten::mm", 2, 6, args={"Input Dims": [[4, 8], [8, 2]], "Input type": HALF}),
        host("aten::copy_", 8, 1),
        host("aten::copy_", 12, 1),
    ]
    entry = grouped(records_of(events, of_gpu=False), 1, 1, None)
    assert {row["what"]: row["ms"] for row in entry["rows"]} == pytest.approx(
        {"4 x 2 x 8": 6e-3, "aten::linear": 3e-3, "aten::copy_": 2e-3}
    )
    assert entry["gap_ms"] == pytest.approx(2e-3)


def test_update_is_profiled_and_its_trace_grouped_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny:2", "-out", str(tmp_path)]
    small = ["-device", "cpu", "-threads", "1", "-image_size", "32", "-updates", "1", "MODEL.DEPTH=1"]
    assert main([*words, *small]) == EXIT_DONE
    path = tmp_path / "profile.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    entry = results["models"]["vit_tiny_patch16_224"]
    groups = {group["group"]: group for group in entry["groups"]}
    assert {PRODUCTS, OPTIMISER, EMA, CLIPPING, METRICS, POINTWISE} <= groups.keys()
    assert groups[EMA]["bytes"] == 12 * entry["parameters"]
    first_product = next(row for row in entry["rows"] if row["what"] == "8 x 192 x 768")  # 4 patches of 2 images
    assert first_product["calls"] == 1
    busy = sum(group["ms"] for group in groups.values())
    assert busy + entry["gap_ms"] - entry["overlap_ms"] == pytest.approx(entry["ms"])
    assert "eager" in capsys.readouterr().out

    for key in ("groups", "rows", "sentence"):
        del entry[key]
    path.write_text(json.dumps(results), encoding="utf-8")
    assert main([*words, "-from_traces"]) == EXIT_DONE
    again = json.loads(path.read_text(encoding="utf-8"))["models"]["vit_tiny_patch16_224"]
    assert {group["group"]: group for group in again["groups"]} == groups

    # A trace without kernels, such as where CUPTI is missing, must not pass for that of a GPU.
    path.write_text(json.dumps(results | {"device": "cuda: NVIDIA H200, 140 GiB"}), encoding="utf-8")
    assert main([*words, "-from_traces"]) == EXIT_FAILED
    assert "no kernels" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "kept"), [("cuda: NVIDIA H200, 140 GiB", True), ("cpu: EPYC, 1 thread", False)])
def test_gpu_table_shows_the_sentence_and_keeps_what_a_gpu_measured(
    device: str, kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"vit_base_patch16_224": {"batch": 256, "sentence": "Of 67.0 ms an update ..."}}
    models["vit_large_patch16_224"] = {"batch": 128, "failed": "out of memory"}
    results = {"device": device, "git": None, "models": models}
    (tmp_path / "profile.json").write_text(json.dumps(results), encoding="utf-8")
    gpu_table.show(tmp_path)
    shown = capsys.readouterr().out
    assert "vit_base_patch16_224, batch 256: Of 67.0 ms an update ..." in shown
    assert "vit_large_patch16_224, batch 128: out of memory" in shown

    page = tmp_path / "README.md"
    page.write_text(f"{gpu_table.BEGIN}\n{gpu_table.END}\n", encoding="utf-8")
    monkeypatch.setattr(gpu_table, "PAGE", page)
    monkeypatch.setattr(gpu_table, "RESULTS", tmp_path / "results")
    gpu_table.RESULTS.mkdir()
    gpu_table.write(tmp_path)
    assert (gpu_table.RESULTS / "profile_h200.json").exists() is kept
