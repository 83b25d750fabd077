#!/usr/bin/env bash
# The tests on several versions of torch and Python; one table and a row of results/torch_versions.jsonl each. Needs a
# registry, and up to 5 GB an environment where only builds for CUDA are served.
#   TORCH="2.11.0 2.12.1 2.13.0" PYTHONS="3.11 3.12" benchmarks/torch_versions.sh [words for pytest]
# Each pair has an environment of its own in outputs/torch_versions, from requirements.txt with another torch, which later
# runs find there. Ends with 1 when a test failed.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=outputs/torch_versions table=$(printf '%-8s %6s  %s\n' torch Python tests) failed=0
for python in ${PYTHONS:-3.11 3.12}; do
    for torch in ${TORCH:-2.11.0 2.12.1 2.13.0}; do
        own=$folder/python-$python-torch-$torch said="no Python" code=0 started=$SECONDS
        echo "== torch $torch, Python $python"
        if "python$python" --version >/dev/null 2>&1; then # or it is a shim of a version that is not chosen
            mkdir -p "$own"
            sed "s/^torch==.*/torch==$torch/" requirements.txt >"$own/wanted.txt"
            if ! cmp -s "$own/wanted.txt" "$own/installed.txt"; then
                "python$python" -m venv --clear "$own/venv" &&
                    "$own/venv/bin/python" -m pip install --quiet -r "$own/wanted.txt" &&
                    cp "$own/wanted.txt" "$own/installed.txt" || exit 1
            fi
            ROSSBY_PYTHON=$PWD/$own/venv/bin/python ./run_tests.sh -rfE "$@" 2>&1 | tee "$own/log.txt"
            code=${PIPESTATUS[0]}
            said=$(grep -E '^FAILED|^ERROR|^=+ .* in ' "$own/log.txt" | sed -E 's/^=+ | =+$//g')
            "$own/venv/bin/python" - "$torch" "$python" "$code" "$said" "$((SECONDS - started))" "$*" <<'END'
import sys
from benchmarks.results_file import record

keys = ("tested_torch", "tested_python", "code", "tests", "seconds", "words")
record("torch_versions", [dict(zip(keys, sys.argv[1:], strict=True))])
END
        fi
        ((code)) && failed=1
        table+=$'\n'$(printf '%-8s %6s  %s' "$torch" "$python" "$said")
    done
done
printf '\n%s\n' "$table"
exit $failed
