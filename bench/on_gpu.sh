#!/usr/bin/env bash
# Checks on one GPU, within MINUTES (11), what a machine without one cannot show. Ends with a table in words.
#
#   bash bench/on_gpu.sh                             # all parts; results in ./on_gpu
#   OUT=/tmp/out MINUTES=5 bash bench/on_gpu.sh first tests
#   DEVICE=cpu bash bench/on_gpu.sh                  # tiny sizes, without a GPU: shows mistakes of this script
#   python bench/gpu_table.py on_gpu -write          # afterwards: to docs/results and README.md
#
#   first    commands that users type first, side by side
#   tests    tests/gpu
#   profile  which kernels take the time of an update, and what perfect ones would save: ViT-S, B and L, in bf16
#   speed    vitamp beside timm: ViT-S and B, then L if there is time, in fp16 and bf16, compiled and eager
#   levers   what compiling and each kernel contribute
#
# A machine without a network needs wheels/ (ignored by git, 23 MB) for what it lacks beside torch, with timm's train.py
# from timm's repository in it. To make it for Python 3.12 on x86-64:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       $(printf -- '--platform manylinux_2_%s_x86_64 ' 28 27 17) --platform manylinux2014_x86_64 -d wheels \
#       timm pydantic pydantic_core annotated_types typing_extensions typing_inspection tqdm simplejpeg torchao \
#       tensorboard tensorboard_data_server absl_py grpcio protobuf markdown werkzeug
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT="$(realpath -m "${OUT:-on_gpu}")" DEVICE="${DEVICE:-cuda}" PYTHON="${PYTHON:-python3}"
deadline=$((60 * ${MINUTES:-11}))
parts=("$@")
((${#parts[@]})) || parts=(first tests profile speed levers)
work="$(mktemp -d)"
mkdir -p "$OUT" "$work/logs"
rm -f "$OUT"/*.json* "$OUT"/*.log "$OUT"/table.md
if [[ -n $(compgen -G 'wheels/*.whl') ]] && ! "$PYTHON" -c 'import timm, pydantic, simplejpeg' 2>/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" wheels/*.whl
    export PYTHONPATH="$work/site"
fi
at_once=$(($(nproc) / 3 > 0 ? $(nproc) / 3 : 1)) # before OMP_NUM_THREADS is set, which nproc obeys
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 XDG_CACHE_HOME="$work/cache"

finish() {
    tar -C "$work" -czf "$OUT/logs.tar.gz" logs
    "$PYTHON" bench/gpu_table.py "$OUT" | tee "$OUT/table.md"
    rm -rf "$work"
}
trap finish EXIT

# `run NAME SECONDS COMMAND...` notes the exit code and the time; a command that is still running then has code 124.
run() {
    local name="$1" limit="$2" began="$SECONDS" code=0
    shift 2
    limit=$((limit < deadline - SECONDS ? limit : deadline - SECONDS))
    if ((limit < 10)); then
        code=125
    else
        timeout -s INT -k 10 "$limit" "$@" >"$work/logs/$name.log" 2>&1 </dev/null || code=$?
    fi
    printf '{"part": "%s", "name": "%s", "code": %d, "seconds": %d}\n' \
        "$part" "$name" "$code" "$((SECONDS - began))" >>"$OUT/checks.jsonl"
}

# The same beside others, as many as there are cores for.
beside() {
    while (($(jobs -rp | wc -l) >= at_once)); do wait -n; done
    run "$@" &
}

single=("$PYTHON" main_single_gpu.py -device "$DEVICE")
if [[ $DEVICE == cpu ]]; then
    export VITAMP_GPU_TESTS_ON=cpu
    recipe=(-cfg configs/vit_tiny_patch16_224.yaml -image_size 32 -batch_size 4 DATA.SYNTHETIC_TRAIN=8)
    auto=("${recipe[@]}" -dataset synthetic -epochs 1 TRAIN.MEMORY_LIMIT=1)
    digits=(-cfg configs/vit_digits.yaml -epochs 4) half=bf16 limit_tests=900
    sizes=('tiny 4 -image_size 32 -updates 1') precisions=bf16 levers=(tiny 4 -image_size 32 -iters 1) rounds=1
    profiled=(-image_size 32 -updates 2)
else
    recipe=(-cfg configs/vit_small_patch16_224.yaml -batch_size 64 DATA.SYNTHETIC_TRAIN=1280)
    auto=("${recipe[@]}" -dataset synthetic -epochs 1 TRAIN.MEMORY_LIMIT=6)
    digits=(-cfg configs/vit_digits.yaml) half=fp16 limit_tests=180
    sizes=('small 512 -updates 12' 'base 256 -updates 12' 'large 128 -updates 12') precisions=fp16,bf16 rounds=3
    levers=(base 128 -iters 12) profiled=(-updates 10)
fi
synthetic=("${recipe[@]}" -dataset synthetic DATA.SYNTHETIC_VAL=64 -num_workers 2 -epochs 1)

# Digits killed after its first checkpoint, then resumed.
kill_and_resume() {
    local folder="$work/killed"
    "${single[@]}" "${digits[@]}" -amp -output "$folder" SAVE_FREQ=1 &
    until [[ -n $(compgen -G "$folder/checkpoints/step-*/meta.json") ]]; do
        kill -0 $! || return 9 # it ended before it had saved
        sleep 0.05
    done
    kill -9 $!
    "${single[@]}" "${digits[@]}" -amp -output "$folder" SAVE_FREQ=1 -resume auto
}

first() {
    local levels=("" bf16 O2 fp8) level
    beside digits 110 "${single[@]}" "${digits[@]}" -amp -output "$work/digits"
    export -f kill_and_resume
    beside kill_and_resume 110 bash -c "$(declare -p single digits work); kill_and_resume"
    beside compiled 110 "${single[@]}" "${synthetic[@]}" -amp TRAIN.COMPILE=whole -output "$work/compiled"
    for level in "${levels[@]}"; do
        # shellcheck disable=SC2086  # no level is no word
        beside "amp_${level:-alone}" 110 "${single[@]}" "${synthetic[@]}" -amp $level -output "$work/amp_$level"
    done
    beside batch_auto 110 "${single[@]}" "${auto[@]}" -amp -batch_size auto TRAIN.GLOBAL_BATCH=256 -output "$work/auto"
    beside dry_run 110 "${single[@]}" "${synthetic[@]}" -amp -dry_run
    local backend=nccl
    [[ $DEVICE == cuda ]] || backend=gloo
    local ranks=("$PYTHON" -m torch.distributed.run --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:0)
    ranks+=(main_multi_gpu.py -device "$DEVICE" -backend "$backend" "${synthetic[@]}" -amp "$half")
    beside ddp 110 "${ranks[@]}" -output "$work/ddp"
    beside fsdp 110 "${ranks[@]}" DIST.STRATEGY=fsdp -output "$work/fsdp"
    beside multi 110 "$PYTHON" main_multi_gpu.py -device "$DEVICE" "${synthetic[@]}" -amp -output "$work/multi"
    wait
    run probe 60 "$PYTHON" scripts/evaluate.py "$work/digits" -probe -device "$DEVICE"
    run predict 60 "$PYTHON" scripts/predict.py "$work/digits" -part val -device "$DEVICE" -out "$work/predictions.csv"
}

tests() {
    local pytest=("$PYTHON" -m pytest tests/gpu -p no:cacheprovider -v -rfE --durations=30)
    run tests "$limit_tests" "${pytest[@]}" -n "$((at_once > 1 ? 3 * at_once - 1 : 2))" --dist worksteal --timing none \
        -m 'not slow'
    run timed_tests 60 "${pytest[@]}" -n 0 --timing only
    cp "$work"/logs/*tests.log "$OUT" || true
}

profile() {
    local size words models=()
    for size in "${sizes[@]}"; do
        read -r -a words <<<"$size"
        models+=("${words[0]}:${words[1]}")
    done
    run profile 240 "$PYTHON" bench/profile_update.py "${models[@]}" -device "$DEVICE" "${profiled[@]}" -out "$OUT"
    cp "$work/logs/profile.log" "$OUT" || true
}

speed() {
    local size words train_py=()
    [[ ! -f wheels/train.py ]] || train_py=(-timm_train wheels/train.py)
    for size in "${sizes[@]}"; do
        read -r -a words <<<"$size"
        run "speed_${words[0]}" 400 "$PYTHON" scripts/benchmark_amp.py timm -device "$DEVICE" \
            -model "vit_${words[0]}_patch16_224" -batch_size "${words[@]:1}" -precisions "$precisions" -compile \
            -rounds "$rounds" "${train_py[@]}" -json "$OUT/peers_${words[0]}.json"
    done
}

# With max_autotune_gemm, torch times Triton's matrix products beside cuBLAS', and fuses bias and GELU into them; only
# without fused_mlp, whose kernel the compiler does not look into.
levers() {
    local products='inductor.max_autotune_gemm=true inductor.triton.enable_persistent_tma_matmul=true'
    run levers 420 "$PYTHON" scripts/benchmark_amp.py settings -device "$DEVICE" -model "vit_${levers[0]}_patch16_224" \
        -batch_size "${levers[@]:1}" -rounds "$rounds" -json "$OUT/levers.json" -amp "$half" \
        -try SPEED=plain -try SPEED=-packed -try SPEED=-fused_mlp -try TRAIN.COMPILE=whole \
        -try 'TRAIN.COMPILE=whole SPEED=-packed' -try 'TRAIN.COMPILE=whole SPEED=+fused_mlp' \
        -try 'TRAIN.COMPILE=whole SPEED=-rewrite' -try 'TRAIN.COMPILE=whole SPEED=+cudnn' \
        -try 'TRAIN.COMPILE=whole inductor.triton.mix_order_reduction=false' \
        -try 'TRAIN.COMPILE=whole inductor.triton.cudagraphs=true' \
        -try "TRAIN.COMPILE=whole SPEED=-fused_mlp $products"
}

for part in "${parts[@]}"; do
    "$part"
done
