#!/usr/bin/env bash
# Trains: sets the project up the first time, then starts train.py on every process of this node.
#   ./run_train.sh                                                 the demo, no data needed
#   ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value
# NGPU: processes on this node (default: the GPUs there are, else 1).
# NNODES, NODE_RANK, RDZV_ENDPOINT=host:port: several nodes, the same command on each. NODE_RANK numbers them from 0
#   (default: Slurm's or Kubernetes' number). The endpoint is an address of node 0 that the others reach, and a free port.
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network between the nodes, where the host's name does not lead to it.
# MAX_RESTARTS: how often ranks are started again after a crash, from the last checkpoint (default: 0).
# ROSSBY_PYTHON: an interpreter that has requirements.txt installed already; nothing is set up then.
# ROSSBY_STARTED: when training.max_wall_time began, in seconds since 1970 (default: the Slurm job's start, or now).
# It may be called from any folder: paths on the command line are the caller's, those in a configuration file begin at
#   the project's folder, and a run whose job.dump_folder is not named lies in outputs/ there.
# Exit codes: 0 done, 1 failed, 2 bad input, 75 to be started again: a signal or the time ended it, after a save if it had
#   taken a step, 130 Ctrl-C before the first step, or a second time.
set -euo pipefail
pwd -P >/dev/null 2>&1 || { echo "rossby: the current folder was removed; change to one that is there" >&2 && exit 2; }
leave() { # at a signal before there are ranks
    [[ -z "${checks:-}" ]] || { kill -KILL "$checks" 2>/dev/null && wait "$checks" 2>/dev/null || true; }
    echo "rossby: $1: before the first step, with nothing to save (code $2)" >&2
    exit "$2"
}
for name in TERM USR1 HUP; do trap "leave SIG$name 75" "$name"; done # those that nohup ignores stay ignored
trap 'leave SIGINT 130' INT
export ROSSBY_STARTED=${ROSSBY_STARTED:-${SLURM_JOB_START_TIME:-$(date +%s)}}
source "$(dirname "$(readlink -f "$0")")/setup.sh" # which gives $project and $PYTHON

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
if [[ "$gpus" != 0 && -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then # which nvidia-smi does not know
    gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
fi
export NGPU=${NGPU:-$((gpus > 0 ? gpus : 1))} NNODES=${NNODES:-1}
MAX_RESTARTS=${MAX_RESTARTS:-0}
# Torch asks the name server about each connection of a store; a lost packet would hold it up for 5 s.
export RES_OPTIONS=${RES_OPTIONS:-timeout:1 attempts:5}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} # the last collectives, written when a run hangs
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # a broken connection is one line here, not C++ frames

refuse() { echo "rossby: $1 = '${!1}': an environment variable; $2" >&2 && exit 2; }
[[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || refuse MAX_RESTARTS "write a whole number"
[[ "$NNODES" =~ ^[1-9][0-9]*$ ]] || refuse NNODES "write a number of nodes"
if [[ "$NNODES" != 1 ]]; then
    RDZV_ENDPOINT=${RDZV_ENDPOINT:-} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}
    [[ "$RDZV_ENDPOINT" =~ .:[0-9]{1,5}$ && 10#${RDZV_ENDPOINT##*:} -lt 65536 ]] ||
        refuse RDZV_ENDPOINT "write host:port of the first node, a free port"
    known() { getent ahosts "${RDZV_ENDPOINT%:*}" >/dev/null; }
    for _ in {1..60}; do known && break || sleep 1; done # the name of a pod is known some seconds after its start
    known || refuse RDZV_ENDPOINT "its host is not known; write host:port of the first node"
    [[ "$NODE_RANK" =~ ^[0-9]+$ && "$NODE_RANK" -lt "$NNODES" ]] || refuse NODE_RANK "write this node's number, from 0"
fi

# What Python starts with is blocked until its handlers are set; macOS and coreutils before 8.31 cannot.
start=(env --block-signal=INT,TERM,USR1,HUP)
"${start[@]}" true 2>/dev/null || start=(env)
asks=
for word in "$@"; do
    case "$word" in -h | --help) asks=$word ;; esac
done
# One process needs no launcher, unless it is to be restarted; help starts no rank.
if [[ "$NGPU" == 1 && "$NNODES" == 1 && "$MAX_RESTARTS" == 0 ||
    -n "$asks" ]]; then
    NNODES=1 NGPU=1 exec "${start[@]}" "$PYTHON" "$project/train.py" "$@"
fi
# With -P modules are the project's: a folder of the caller's may have its own "datasets".
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH}
# Bad input ends here: one line, exit code 2, before any rank exists.
(trap '' INT TERM USR1 HUP && exec "$PYTHON" -P -m planning.start_checks "$@") & # the signals are this script's
checks=$!
wait "$checks"
checks=
# Processes that share a machine share its cores, or they take them from each other.
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) # macOS has no nproc
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
nodes=(--nnodes "$NNODES") # never empty: bash 3.2 takes an empty array for an unset variable
[[ "$NNODES" == 1 ]] || nodes+=(--node-rank "$NODE_RANK" --rdzv-endpoint "$RDZV_ENDPOINT")
exec "${start[@]}" "$PYTHON" -P -m jobs.torchrun --nproc-per-node "$NGPU" --max-restarts "$MAX_RESTARTS" "${nodes[@]}" \
    "$project/train.py" "$@"
