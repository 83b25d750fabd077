#!/usr/bin/env bash
# What 2 to 512 GPUs can answer, in 20 minutes: every layout against one process on NCCL, bandwidths by axis, weak and
# strong scaling over the layouts that plan.py ranks, the planner beside each; one table last.
#   NGPU=8 benchmarks/cluster.sh --cluster h100       on every node the same command, with NNODES, NODE_RANK, RDZV_ENDPOINT as for
#                                                     run_train.sh where there are several
#   NGPU=4 benchmarks/cluster.sh --rehearse           on a CPU with gloo and tiny sizes; its figures mean nothing
# OUT: a folder for rows; without it they go to benchmarks/results/cluster.jsonl, of a rehearsal to outputs/cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
source ./setup.sh
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
hosts=(--nproc-per-node "${NGPU:-$((gpus > 0 ? gpus : 1))}" --nnodes "${NNODES:-1}")
[[ "${NNODES:-1}" == 1 ]] || hosts+=(--node-rank "$NODE_RANK" --rdzv-endpoint "$RDZV_ENDPOINT")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -P -m jobs.torchrun "${hosts[@]}" benchmarks/cluster.py "$@"
