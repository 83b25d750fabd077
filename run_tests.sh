#!/usr/bin/env bash
# Tests: sets the project up the first time, then runs pytest with what you pass on, two files of tests at a time.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh
exec "$PYTHON" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
