# Sourced by test.sh and demo.sh. `ensure_env` makes .venv when it is absent, half-made or out of date, and puts it on PATH.
#
# An environment is finished when .venv/.stamp holds the fingerprint of pyproject.toml, the interpreter and this folder. While one
# is being made, .venv/.making exists: whatever is found with it later was interrupted and is made again. A lock
# keeps two starts from installing into one folder; the second waits.
# PYTHON=/path/to/python3.12 chooses the interpreter.
# shellcheck shell=bash

EXECPLAN_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EXECPLAN_EXTRAS="train,eval,dev"

die() {
    echo "error: $*" >&2
    exit 2
}

# The first interpreter of 3.11 or newer; one line says what is wrong when there is none.
find_python() {
    local candidate version found=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        found="$found $candidate=$version"
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
            die "$candidate has no venv module; install it (Debian, Ubuntu: apt install python$version-venv) or set PYTHON to another Python"
        echo "$candidate"
        return
    done
    die "Python 3.11 or newer is needed, found:${found:- none}; install one or set PYTHON=/path/to/python3.11"
}

env_fingerprint() {
    "$1" - "$EXECPLAN_ROOT" "$EXECPLAN_EXTRAS" <<'PY'
import hashlib, pathlib, sys
root, extras = sys.argv[1:]
parts = (pathlib.Path(root, "pyproject.toml").read_text(), sys.version, root, extras)
print(hashlib.sha256("\n".join(parts).encode()).hexdigest())
PY
}

make_env() {
    local venv="$EXECPLAN_ROOT/.venv" python fingerprint started=$SECONDS
    # A .venv without .making that runs is kept and only completed: it may hold packages that its owner put there (vllm).
    if [ -e "$venv/.making" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        # Not inside the local line: there, a failing find_python would go unnoticed.
        python="$(find_python)" || exit 2
        echo "making .venv with $python and installing into it (about 3 minutes, once; progress in .venv/install.log)"
        rm -rf "$venv"
        mkdir "$venv"
        touch "$venv/.making"
        "$python" -m venv "$venv" || die "$python -m venv failed; the lines above say why"
    else
        echo "bringing .venv up to date with pyproject.toml"
        rm -f "$venv/.stamp"
        touch "$venv/.making"
    fi
    if ! (cd "$EXECPLAN_ROOT" && "$venv/bin/python" -m pip install -e ".[$EXECPLAN_EXTRAS]" >"$venv/install.log" 2>&1); then
        tail -n 15 "$venv/install.log" >&2
        die "the installation failed, the lines above say why (a network or a package mirror is needed once); then start again"
    fi
    fingerprint="$(env_fingerprint "$venv/bin/python")"
    echo "$fingerprint" >"$venv/.stamp"
    rm -f "$venv/.making"
    echo "environment ready after $((SECONDS - started)) s"
}

env_is_ready() {
    local venv="$EXECPLAN_ROOT/.venv"
    [ -x "$venv/bin/python" ] && [ ! -e "$venv/.making" ] && [ -f "$venv/.stamp" ] || return 1
    [ "$(cat "$venv/.stamp")" = "$(env_fingerprint "$venv/bin/python" 2>/dev/null)" ]
}

ensure_env() {
    if ! env_is_ready; then
        (
            if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
                echo "another start is making .venv; waiting for it"
                flock 9
            fi
            env_is_ready || make_env 9>&-
        ) 9>>"$EXECPLAN_ROOT/.venv.lock" || exit $?
    fi
    export PATH="$EXECPLAN_ROOT/.venv/bin:$PATH" VIRTUAL_ENV="$EXECPLAN_ROOT/.venv"
    unset PYTHONHOME
}
