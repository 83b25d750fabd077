#!/usr/bin/env bash
# What a pod of launch/jobset.yaml runs: looks at its node, with the others, then becomes run_train.sh. The arguments,
# NNODES, NGPU and RDZV_ENDPOINT are run_train.sh's.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/../setup.sh" # which gives $project and $PYTHON
source "$project/launch/fabric.sh"

looks=
leave() { # told to stop before there is anything to save
    kill "$looks" 2>/dev/null && wait "$looks" || true
    exit 75
}
trap leave TERM
for ((seconds = 0; seconds < 900; seconds++)); do # a pod's name is known some seconds after the pod is there
    getent hosts "${RDZV_ENDPOINT%:*}" >/dev/null && break
    sleep 1 &
    wait $!
done
PYTHONPATH=$project "$PYTHON" -P -m jobs.preflight "$@" &
looks=$!
wait "$looks"
trap - TERM
exec "$project/run_train.sh" "$@"
