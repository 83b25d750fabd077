#!/usr/bin/env bash
# Everything that one GPU can answer, in under 8 minutes: train.py killed and resumed, steps of vit1b, kernels, tests,
# saves, loader, peers, rollout, planner; one table last, with the floors and goals. Needs no
# network, and torch 2.11 or later.
#   benchmarks/gpu.sh              (ROSSBY_PYTHON names an interpreter that has the packages)
#   benchmarks/gpu.sh --rehearse   the same on a CPU with tiny sizes, in four minutes; its figures mean nothing
#   benchmarks/gpu.sh --gather [PYTHON_VERSION]    fills .gpu with what a machine without a network lacks: wheels for its
#     Python (default: 3.12; x86-64 Linux with torch, numpy and scipy in place)
# OUT: a folder for the rows (as they are measured) and the log; without it they go to
#   benchmarks/results/gpu.jsonl and outputs/gpu/gpu.log.
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh

gather() {
    local python=${1:-3.12} platforms=() pinned glibc
    local packages=(tomli tomli_w torchdata torchao zarr numcodecs donfig crc32c google-crc32c h5netcdf dask cloudpickle partd locket toolz)
    pinned=$(grep -hE "^($(IFS='|' && echo "${packages[*]}"))==" requirements.txt)
    rm -rf ".gpu/wheels-$python"
    for glibc in _2_28 _2_27 _2_26 _2_24 _2_17 2014 1; do platforms+=(--platform "manylinux${glibc}_x86_64"); done
    # shellcheck disable=SC2086  # a word a package
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest ".gpu/wheels-$python" \
        --python-version "$python" --implementation cp "${platforms[@]}" $pinned timm
    du -sh .gpu
}

if [[ "${1:-}" == "--gather" ]]; then
    gather "${@:2}"
    exit
fi
wheels=.gpu/wheels-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [[ -d $wheels ]]; then # packages that a Python of this version lacks, installed for this run only
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
log=${OUT:-outputs/gpu}/gpu.log
mkdir -p "$(dirname "$log")"
PYTHONUNBUFFERED=1 "$PYTHON" benchmarks/gpu.py "$@" 2>&1 | tee "$log"
