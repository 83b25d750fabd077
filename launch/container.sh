#!/usr/bin/env bash
# What an image is made of, as root in a fresh Debian 12 that has /rossby/setup.sh and /rossby/requirements.txt: the
# Dockerfile and the Apptainer definition run these same steps.
# TORCH_INDEX: where torch comes from besides PyPI, whose torch brings CUDA's libraries (the driver is the host's). For
#   an image without CUDA, a tenth as large: PyTorch's index of wheels for CPUs, which its page "Get started" names.
set -euo pipefail
packages=(
    python3 python3-venv
    python3-dev gcc g++ # torch.compile builds its kernels, and Triton its launchers, where they run
    ca-certificates # data.path = "https://..."
    libibverbs1 ibverbs-providers # NCCL opens them for InfiniBand: without them it goes over TCP
)
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*
if [[ -n "${TORCH_INDEX:-}" ]]; then
    export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:+$PIP_EXTRA_INDEX_URL }$TORCH_INDEX"
fi
export PIP_NO_CACHE_DIR=1 # it would stay in the image
unset ROSSBY_PYTHON
source /rossby/setup.sh
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
