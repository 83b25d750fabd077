# Sourced by run_train.sh, run_tests.sh, .ci/run and scripts/slurm.sbatch: sets PYTHON, after building .venv from
# requirements.txt where it is missing or of other versions. Nothing outside this folder is touched, and the current
# folder stays what it was.
project=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if [[ -n "${ROSSBY_PYTHON:-}" ]]; then
    PYTHON=$ROSSBY_PYTHON
    command -v "$PYTHON" >/dev/null || { echo "rossby: ROSSBY_PYTHON = $PYTHON: not an interpreter" >&2; exit 2; }
else
    PYTHON=$project/.venv/bin/python
    # An environment made by `uv sync` has no pip; uv keeps it up to date. One whose Python was removed is made again.
    is_set_up() {
        [[ -x "$PYTHON" ]] || return 1
        cmp -s "$project/requirements.txt" "$project/.venv/installed.txt" || grep -qs '^uv = ' "$project/.venv/pyvenv.cfg"
    }
    if ! is_set_up; then
        # Two starts at once: the second waits, and finds it done.
        exec 9>"$project/.setup.lock"
        flock 9 2>/dev/null || echo "rossby: no locks in $project: one start at a time until .venv is there" >&2
    fi
    if ! is_set_up; then
        for base in python3 python3.13 python3.14 python3.12 python3.11 ''; do
            [[ -n "$base" ]] || { echo "rossby: Python 3.11 to 3.14 is needed; none is on PATH" >&2; exit 2; }
            "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && break
        done
        started=$SECONDS
        echo "rossby: setting up .venv from requirements.txt (once; some minutes)" >&2
        [[ -x "$PYTHON" ]] || rm -f "$project/.venv/bin/python"* # links to a Python that is gone
        # Debian's Python makes the folder without pip, and the next start would find it.
        "$PYTHON" -m pip --version &>/dev/null || "$base" -m venv "$project/.venv" || {
            echo "rossby: $base has no pip for .venv; on Debian and Ubuntu: apt install python3-venv" >&2
            exit 2
        }
        # Twice quiet: errors alone, no warning about a place that lacks a package.
        "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-compile -r "$project/requirements.txt" || {
            echo "rossby: requirements.txt is not installed, see above; the same command goes on from here" >&2
            exit 1
        }
        # On all cores, where pip takes one; not the tests of packages, a quarter of their lines, which nothing imports.
        "$PYTHON" -m compileall -qq -j 0 -x "site-packages/.*/tests/" "$project/.venv/lib" || true
        cp "$project/requirements.txt" "$project/.venv/installed.txt"
        echo "rossby: .venv is set up after $((SECONDS - started)) s" >&2
    fi
    exec 9>&-
fi
# OpenMP threads that spin while they wait starve each other as soon as anything else runs: on 2 busy cores a step of the
# demo took 1.8 s instead of 0.2. Spinning a little, then sleeping, costs nothing when the machine is idle.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}
