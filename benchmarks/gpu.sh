#!/usr/bin/env bash
# Everything that one GPU can answer, in under 8 minutes: train.py killed and resumed, steps of vit1b, kernels, tests, a
# rank of a cluster, saves, loader, peers, rollout, planner; one table last, beside the floors and goals. Needs no
# network, and torch 2.11 or later.
#   benchmarks/gpu.sh              (ROSSBY_PYTHON names an interpreter that has the packages)
#   benchmarks/gpu.sh --rehearse   the same on a CPU with tiny sizes, in four minutes; its figures mean nothing
# OUT: a folder for the rows (as they are measured), the calibrated rates and the log; without it they go to
#   benchmarks/results/gpu.jsonl, outputs/calibration.json and outputs/gpu/gpu.log.
# .gpu/wheels-3.12, which benchmarks/gpu_wheels.sh fills: packages that a Python of this version lacks, installed for this
#   run only.
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
wheels=.gpu/wheels-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [[ -d $wheels ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
log=${OUT:-outputs/gpu}/gpu.log
mkdir -p "$(dirname "$log")"
PYTHONUNBUFFERED=1 "$PYTHON" benchmarks/gpu_parts.py "$@" 2>&1 | tee "$log"
