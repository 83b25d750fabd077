#!/usr/bin/env bash
# Trains: sets the project up the first time, then starts train.py on every process of this node.
#   ./run_train.sh                                                 the demo, no data needed
#   ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value
# NGPU: processes on this node (default: the GPUs there are, else 1). NNODES, RDZV_ENDPOINT: several nodes.
# ROSSBY_PYTHON: an interpreter that has requirements.txt installed already; nothing is set up then.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
export NGPU=${NGPU:-$((gpus > 0 ? gpus : 1))} NNODES=${NNODES:-1}

# One process needs no launcher; help and print_config start no rank.
if [[ "$NGPU" == 1 && "$NNODES" == 1 || " $* " =~ [[:space:]](-h|--help|--job.print_config[^[:space:]]*)[[:space:]] ]]; then
    NNODES=1 NGPU=1 exec "$PYTHON" train.py "$@"
fi
# Bad input ends here: one line, exit code 2, before any rank exists.
"$PYTHON" config.py "$@"
# Processes that share a machine share its cores, or they take them from each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > NGPU ? $(nproc) / NGPU : 1))}
if [[ "$NNODES" == 1 ]]; then
    rendezvous=(--standalone)
else
    rendezvous=(--rdzv_backend c10d --rdzv_endpoint "${RDZV_ENDPOINT:?set RDZV_ENDPOINT=host:port of the first node}")
fi
exec "$PYTHON" -m torch.distributed.run --nproc_per_node "$NGPU" --nnodes "$NNODES" "${rendezvous[@]}" train.py "$@"
