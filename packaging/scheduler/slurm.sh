#!/bin/sh
# A Slurm array: each task runs a shard, and a last job merges the results. From the folder of the project:
#   jobs=$(sbatch --parsable --array=1-16 slurm.sh tests/rdma --seeds 1..100000)
#   sbatch --dependency=afterany:$jobs --export=ALL,SHARDS=16 slurm.sh tests/rdma --seeds 1..100000
#SBATCH --job-name=softhca
#SBATCH --cpus-per-task=1
#SBATCH --requeue
# A task that is killed with its node is requeued, and writes its file again.
set -u
results=${RESULTS:-results}
mkdir -p "$results"
if [ -n "${SHARDS:-}" ]; then
    exec softhca run "$@" --merge "$results" --shards "$SHARDS" --junit softhca.xml --summary softhca.md
fi
exec softhca run "$@" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --json >"$results/$SLURM_ARRAY_TASK_ID.json"
