# One task a node, whose launcher starts the ranks, hands on signals, and starts them again after a crash.
srun "${steps[@]}" "$project/run_train.sh" "${arguments[@]}" || code=$?
