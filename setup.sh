# Sourced by run_train.sh and run_tests.sh: sets PYTHON, building .venv from requirements.txt when it is missing or older.
# Nothing outside this folder is touched.
if [[ -n "${ROSSBY_PYTHON:-}" ]]; then
    PYTHON=$ROSSBY_PYTHON
    command -v "$PYTHON" >/dev/null || { echo "rossby: ROSSBY_PYTHON = $PYTHON: not an interpreter" >&2; exit 2; }
else
    PYTHON=.venv/bin/python
    if ! cmp -s requirements.txt .venv/installed.txt; then
        for base in python3 python3.12 python3.11; do
            "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && break
            base=
        done
        [[ -n "$base" ]] || { echo "rossby: Python 3.11 or 3.12 is needed; none was found on PATH" >&2; exit 2; }
        echo "rossby: setting up .venv (once; some minutes)" >&2
        "$base" -m venv --clear .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
        cp requirements.txt .venv/installed.txt
    fi
fi
