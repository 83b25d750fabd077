#!/usr/bin/env bash
# Gathers in .gpu what a GPU machine without a network lacks: wheels for its Python, and the smallest real winds.
# benchmarks/gpu.sh finds both there.
#   benchmarks/gpu_wheels.sh [PYTHON_VERSION]     (default: 3.12; for x86-64 Linux with torch, numpy and scipy in place)
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
python=${1:-3.12}
packages=(tomli tomli_w torchdata torchao zarr numcodecs donfig google-crc32c h5netcdf dask cloudpickle partd locket toolz)
pinned=$(grep -hE "^($(IFS='|' && echo "${packages[*]}"))==" requirements.txt)
rm -rf ".gpu/wheels-$python"
platforms=()
for glibc in 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
# shellcheck disable=SC2086  # a word a package
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest ".gpu/wheels-$python" --python-version "$python" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 $pinned timm
data=../shared/data
if [[ -d $data ]]; then
    mkdir -p .gpu/data/gfs_winds_2026 .gpu/data/static
    cp -f "$data"/gfs_winds_2026/*_5.625deg.nc .gpu/data/gfs_winds_2026/
    cp -f "$data"/static/landsea.nc .gpu/data/static/
fi
du -sh .gpu
