#!/usr/bin/env bash
# The tests on torch 2.11, 2.12 and 2.13, on Python 3.11 and 3.12; see benchmarks/torch_versions.py. Needs a registry, and
# up to 5 GB an environment where only builds for CUDA are served.
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
exec "$PYTHON" benchmarks/torch_versions.py "$@"
