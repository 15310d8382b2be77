"""Let torchvision's CUDA build be imported beside a torch without CUDA: vLLM's Qwen3.5 and transformers import it.

On x86 PyPI has torchvision with CUDA only. Beside a CPU torch its extension is not loaded, and the import dies on two
operators that are then not declared. Declaring them first is enough; nobody here calls them. It has to happen in every
process, so scripts/_vllm.sh copies this file into the environment, with a .pth line that imports it at start-up. That
costs next to nothing: torch is only loaded by who imports torchvision.
"""

import sys
from importlib.machinery import ModuleSpec
from typing import Any

_OPERATORS = ("nms", "qnms")


class _BeforeTorchvision:
    """A finder that finds nothing: it acts when torchvision is about to be imported, once."""

    library: Any = None  # the declarations live as long as it does

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by the import system for every module that is not loaded yet."""
        if name == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                declare: Any = torch.library.Library
                self.library = declare("torchvision", "DEF")
                for operator in _OPERATORS:
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
