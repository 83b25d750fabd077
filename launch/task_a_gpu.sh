# One task a GPU, without a launcher: Slurm starts the ranks, and its signals reach each of them.
export MASTER_ADDR=${RDZV_ENDPOINT%:*} MASTER_PORT=${RDZV_ENDPOINT##*:} PYTHONPATH=$project
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-%%cpus_per_rank}
# A task sees all GPUs of its node and takes that of its number: bound to one, NCCL could not go over NVLink.
steps+=(--ntasks=$((NNODES * NGPU)) --ntasks-per-node="$NGPU" --cpus-per-task=%%cpus_per_rank --gpu-bind=none)
for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
    code=0
    srun "${steps[@]}" "$PYTHON" -P -m launch.slurm_rank "$project/train.py" "${arguments[@]}" || code=$?
    if [[ $code == 0 || $code == 2 || $code == 75 ]]; then
        break
    fi
done
