#!/usr/bin/env bash
# A vLLM server for each GPU of this node, for a training run elsewhere with rollout.engine=server:
#
#   bash slurm/rollout_servers.sh MODEL FIRST_PORT [what else vllm serve takes]
#
# MODEL is the run's model.path; the ports are FIRST_PORT, FIRST_PORT+1, …; GPUS says how many (default: the job's on this
# node, or 1). When one of them ends, all do, and the status says so. slurm/grpo_servers.sh starts this on its nodes.
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
if [ $# -lt 2 ]; then
    echo "error: give a model and the first port: bash slurm/rollout_servers.sh MODEL FIRST_PORT" >&2
    exit 2
fi
model="$1" first_port="$2"
shift 2
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

gpus="${GPUS:-${SLURM_GPUS_ON_NODE:-1}}"
mapfile -t devices < <(seq 0 $((gpus - 1)))
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
fi

servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT
for ((i = 0; i < gpus; i++)); do
    CUDA_VISIBLE_DEVICES="${devices[i]}" .venv/bin/python -m shared.engines.vllm_server "$model" \
        --host 0.0.0.0 --port $((first_port + i)) "$@" &
    servers+=($!)
done

wait -n "${servers[@]}" && code=0 || code=$?
echo "a server ended with status $code; the others end with it" >&2
exit $((code == 0 ? 1 : code))
