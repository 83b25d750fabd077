#!/usr/bin/env bash
# Everything that one GPU can answer, in under 9 minutes: tests, kernels, steps of vit1b, planner, rollout, first step,
# saves, loader, peers; one table last, beside the floors and goals. Needs no network, and torch 2.11 or later.
# What is not installed there (timm, torchao, zarr) costs its part one line; torch, numpy, tomli and tomli_w have to be.
#   benchmarks/gpu.sh              (ROSSBY_PYTHON names an interpreter that has the packages)
#   benchmarks/gpu.sh --rehearse   the same on a CPU with tiny sizes, in two minutes; its figures mean nothing
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
exec "$PYTHON" benchmarks/gpu_parts.py "$@"
