#!/usr/bin/env bash
# What one GPU can answer now, in a few minutes: the tests, then short trainings of a 4-layer vit1b block on simulated
# weather in bf16, compiled, and in float8. ROSSBY_PYTHON names an interpreter that has the packages.
#   benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "benchmarks/gpu.sh: no GPU here" >&2; exit 2; }
"$PYTHON" -m pytest tests/test_vit.py tests/test_float8.py tests/test_compile.py
wide=(--model.dim 1536 --model.num_heads 24 --model.num_layers 4 --training.steps 40 --validation.enable false --checkpoint.enable false)
for options in "--model.attention_backend sdpa" "--model.attention_backend sdpa --compile.enable" "--model.attention_backend sdpa --compile.enable --float8.enable --float8.filter_min_features 1024" "--model.attention_backend cudnn"; do
    echo "== bf16 $options"
    # shellcheck disable=SC2086
    NGPU=1 ./run_train.sh "${wide[@]}" --training.mixed_precision_param bfloat16 $options \
        --job.dump_folder "outputs/gpu" 2>&1 | grep "step  " | tail -n 2
done
# Checkpoints from pinned memory, and a bad step that the fused optimiser skips on the device.
"$PYTHON" -m pytest tests/test_checkpoint.py tests/test_bad_steps.py tests/test_forecast.py
"$PYTHON" benchmarks/checkpoint_stall.py --dim 1536
