#!/usr/bin/env bash
# Training on the first node, rollouts on the others: a vLLM server for each of their GPUs.
#
#   sbatch slurm/grpo_servers.sh                             one node trains, one samples
#   sbatch --nodes=4 slurm/grpo_servers.sh                   one trains, three sample
#   CONFIG=configs/grpo_bird.yaml sbatch slurm/grpo_servers.sh steps=600     what follows goes to train.run
#
# Training is slurm/grpo_curriculum.sh with rollout.engine=server: it saves, leaves and puts the job back into the queue as
# that does; the servers are started anew with the job and get the run's weights before its next step. All nodes must
# see the project's folder; new weights pass through the run's (rollout.sync_folder=… for another).
#
#SBATCH --job-name=grpo_servers
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=3
#SBATCH --cpus-per-task=24
#SBATCH --mem=200G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm/%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
export CONFIG="${CONFIG:-configs/grpo_curriculum.yaml}"
if [ ! -x .venv/bin/python ]; then
    echo "error: $PWD/.venv has no python; call sbatch in the project's folder, after bash scripts/test.sh has made .venv" >&2
    exit 2
fi
if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "error: there is no job: submit this file with sbatch" >&2
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "${#nodes[@]}" -lt 2 ]; then
    echo "error: servers need a node of their own: sbatch --nodes=2 or more, or slurm/grpo_curriculum.sh for one" >&2
    exit 2
fi
MODEL="${MODEL:-$(.venv/bin/python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["model"]["path"])' "$CONFIG")}"
gpus="${SLURM_GPUS_ON_NODE:-3}"
# Ports of this job's own: other jobs may share the nodes.
first_port=$((20000 + SLURM_JOB_ID % 2000 * 16))

leaving="" training=""
# shellcheck disable=SC2329  # called by the trap
leave() {
    leaving=1
    if [ -n "$training" ]; then
        kill -USR1 "$training" 2>/dev/null || true
    fi
}
trap leave USR1 TERM
requeue() {
    echo "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
}

servers=() addresses=()
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --gpus-per-node="$gpus" bash slurm/rollout_servers.sh \
        "$MODEL" "$first_port" --max-model-len "${MAX_MODEL_LEN:-24576}" --gpu-memory-utilization 0.9 &
    servers+=($!)
    for ((i = 0; i < gpus; i++)); do
        addresses+=("http://$node:$((first_port + i))")
    done
done
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT

# Inside the cluster nothing goes through a proxy.
hosts="$(IFS=, && echo "${nodes[*]}")"
export no_proxy="${no_proxy:+$no_proxy,}$hosts" NO_PROXY="${NO_PROXY:+$NO_PROXY,}$hosts"
deadline=$((SECONDS + ${START_SECONDS:-1800}))
for address in "${addresses[@]}"; do
    until curl --silent --fail --max-time 10 --output /dev/null "$address/health"; do
        for server in "${servers[@]}"; do
            if ! kill -0 "$server" 2>/dev/null; then
                echo "error: the servers of a node ended before they answered: see above" >&2
                exit 1
            fi
        done
        if [ -n "$leaving" ]; then
            break 2
        fi
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "error: $address does not answer" >&2
            exit 1
        fi
        sleep 2
    done
done

if [ -n "$leaving" ]; then
    echo "signal received before training began"
    requeue
    exit 75
fi
export EXECPLAN_ROLLOUT_SERVERS="${addresses[*]}"
echo "rolling out on $EXECPLAN_ROLLOUT_SERVERS"
bash slurm/grpo_curriculum.sh rollout.engine=server "$@" &
training=$!

# `wait` returns when a signal comes in; what counts is the status of the process once it has ended.
code=0
while kill -0 "$training" 2>/dev/null; do
    wait "$training" && code=0 || code=$?
done
# A signal in its first moments ends that shell before it can answer to one.
if [ -n "$leaving" ] && [ "$code" -gt 128 ]; then
    requeue
fi
exit "$code"
