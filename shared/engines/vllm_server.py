"""A vLLM server whose weights a trainer may replace:

    python -m shared.engines.vllm_server MODEL --port 8000 [what else `vllm serve` takes]

It is `vllm serve` with the receiver of weights (shared/engines/vllm_server_worker.py), the endpoints that a trainer
needs, and the settings of shared/engines/vllm.py; flags given here win. Whoever reaches the port can replace the
weights and stop the server: it belongs inside a cluster's own network.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.cli import run_main
from shared.engines.vllm import has_linear_attention, import_vllm
from shared.errors import SetupError

WORKER = "shared.engines.vllm_server_worker.WeightReceiver"
_FLAGS = (
    *("--worker-extension-cls", WORKER),
    # The full softmax at temperature 1: the quantity that a trainer recomputes.
    *("--logprobs-mode", "raw_logprobs"),
    *("--generation-config", "vllm"),
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0}'),
    # /inference/v1/generate, which says what weights a token came from.
    "--enable-scale-out",
    "--enable-prefix-caching",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
)


def server_arguments(model: str, more: Sequence[str], *, cpu: bool) -> list[str]:
    """The arguments of `vllm` for a server of `model`, with `more` last: of a flag given twice the last counts."""
    flags = list(_FLAGS)
    if cpu:
        # See shared/engines/vllm.py: seeded requests whose prompt is read in pieces kill vLLM 0.32 here.
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if has_linear_attention(Path(model)):
            flags.append("--no-enable-prefix-caching")
    return ["vllm", "serve", model, *flags, *more]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop."""
    model, *more = (sys.argv[1:] if argv is None else argv) or [""]
    if not model or model.startswith("-"):
        raise SetupError("give the model first: python -m shared.engines.vllm_server MODEL --port 8000")
    # The server's own process talks to the engine's, and takes weights on its development endpoints.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    import_vllm()
    _name_the_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    sys.argv = server_arguments(model, more, cpu=current_platform.is_cpu())
    vllm_main()
    return 0


def _name_the_cpu_build() -> None:
    """vLLM's command line asks for the version of a package named vllm, which the CPU build is not."""
    version = importlib.metadata.version

    def named(distribution_name: str) -> str:
        return version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else version(distribution_name)

    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = named


if __name__ == "__main__":
    run_main(main)
