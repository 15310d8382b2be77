#!/usr/bin/env bash
# The curriculum run on one node of 3 GPUs: the recipe of configs/grpo_curriculum.yaml, continued over as many jobs as it takes.
#
#   sbatch slurm/grpo_curriculum.sh                                 from the project's folder
#   CONFIG=configs/grpo_bird.yaml sbatch slurm/grpo_curriculum.sh   a sibling
#   sbatch slurm/grpo_curriculum.sh optimizer.lr=5e-6 steps=600     what follows goes to train.run
#
# Before the first job, on a node with a network: bash scripts/test.sh (makes .venv), then fetch model and data into the
# hub's cache (hf download …); jobs run offline. Ten minutes before the time limit, or when the job is preempted,
# the ranks save and leave, and the job puts itself back into the queue; its next start continues from the newest
# complete checkpoint in the same folder. To end a run early for good: scancel it.
#
#SBATCH --job-name=grpo_curriculum
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=3
#SBATCH --cpus-per-task=24
#SBATCH --mem=200G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm/%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file, so the project's folder is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
CONFIG="${CONFIG:-configs/grpo_curriculum.yaml}"
if [ ! -x .venv/bin/torchrun ]; then
    echo "error: $PWD/.venv has no torchrun; call sbatch in the project's folder, after bash scripts/test.sh has made .venv" >&2
    exit 2
fi
OUTPUT="${OUTPUT:-runs/$(basename "$CONFIG" .yaml)}"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:+$((SLURM_CPUS_PER_TASK / 3))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# --standalone takes a free port of its own, so that two jobs on one node don't meet.
.venv/bin/torchrun --standalone --nproc-per-node 3 -m train.run --config "$CONFIG" "output=$OUTPUT" "$@" &
torchrun=$!

# The signal comes to this shell alone, and torchrun would die of it: it is for the ranks, which are torchrun's children.
leaving=""
# shellcheck disable=SC2329  # called by the trap
leave() {
    echo "signal received: asking every rank to save and leave"
    leaving=1
    pkill -USR1 -P "$torchrun" || true
}
trap leave USR1 TERM

# `wait` returns when a signal comes in; what counts is the status of the process once it has ended.
code=0
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" && code=0 || code=$?
done

if [ -n "$leaving" ] && [ "$code" -ne 0 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    echo "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
