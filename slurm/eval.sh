#!/usr/bin/env bash
# One model over one benchmark, in both modes, on one GPU. Arguments go to eval.run:
#
#   sbatch slurm/eval.sh --model exports/curriculum --benchmark bird --questions data/bird/dev.json --databases data/bird/dev_databases
#   MODES=withheld sbatch slurm/eval.sh --model …
#
# Each mode writes to OUT/full and OUT/withheld (OUT defaults to runs/eval-JOBID). Started again with the
# same OUT it continues where it was cut off, so a job that runs into its time limit is submitted once more.
#
#SBATCH --job-name=eval
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --open-mode=append
#SBATCH --output=slurm/%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file, so the project's folder is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
if [ ! -x .venv/bin/python ]; then
    echo "error: $PWD/.venv has no python; call sbatch in the project's folder, after bash scripts/test.sh has made .venv" >&2
    exit 2
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

OUT="${OUT:-runs/eval-${SLURM_JOB_ID:-local}}"
for mode in ${MODES:-full withheld}; do
    if [ -f "$OUT/$mode/summary.json" ]; then
        echo "$OUT/$mode is finished"
        continue
    fi
    .venv/bin/python -m eval.run "$@" --mode "$mode" --out "$OUT/$mode"
done
