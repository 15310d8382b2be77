"""Whether vLLM is here, and how the tests run it: in processes of their own, on little memory."""

import importlib.util
import os
import sys

import pytest

# The CPU build shares the cores with whatever else runs; threads that spin would take them.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def need_vllm() -> None:
    """Skip where vLLM is not installed; fail in continuous integration, where test.sh adds its CPU build."""
    if importlib.util.find_spec("vllm") is not None:
        return
    reason = "vllm is not installed: bash scripts/test.sh adds its CPU build where torch has no accelerator"
    if os.environ.get("CI") == "true" and os.environ.get("SKIP_VLLM") != "1" and sys.platform == "linux":
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            pytest.fail(reason)
    pytest.skip(reason)
