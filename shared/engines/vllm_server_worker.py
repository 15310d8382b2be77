"""What a server started by shared/engines/vllm_server.py can do with its weights, called over HTTP by a trainer.

vLLM adds the methods of `WeightReceiver` to its worker (`--worker-extension-cls`), and its /collective_rpc calls them
with text as arguments. They answer with a JSON object; a fault is its "error", because vLLM would make it a 500.
"""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from shared.engines.vllm_weights import checksum, kernel_tensors, repack_tied_heads

Answer = dict[str, Any]


def _saying_errors(method: Callable[..., Answer]) -> Callable[..., Answer]:
    @wraps(method)
    def answer(*arguments: Any) -> Answer:
        try:
            return method(*arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class WeightReceiver:
    """Mixed into vLLM's worker, which has the two methods declared here."""

    get_model: Callable[[], Any]
    reload_weights: Callable[..., None]

    @_saying_errors
    def describe_weights(self) -> Answer:
        """Shape and type of every tensor by its name in vLLM: {"tensors": {name: [[rows, columns], "bfloat16"]}}."""
        tensors = kernel_tensors(self.get_model())
        return {"tensors": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors}}

    @_saying_errors
    def receive_weights(self, files: str, names: str) -> Answer:
        """Load the tensors `names` (under checkpoint names) from the safetensors `files`; both are JSON lists.

        What is not among them keeps its old weight. Files that hold others, or not all of these, are refused before
        anything is loaded. Answers {"loaded": how many}.
        """
        paths = [Path(file) for file in json.loads(files)]
        wanted, found = json.loads(names), _names(paths)
        if sorted(wanted) != sorted(found):
            first = min(set(wanted) ^ set(found), default="one twice")
            raise ValueError(f"the files have {len(found)} tensors and not these {len(wanted)}: {first}")
        self.reload_weights(weights_iterator=_tensors(paths))
        repack_tied_heads(self.get_model())
        return {"loaded": len(found)}

    @_saying_errors
    def checksum_weights(self, pieces: str) -> Answer:
        """Checksums of rows of tensors as the kernels have them; `pieces` is a JSON list of [name, first row, rows].

        Answers {"checksums": [...]} in that order, as decimal text: they have 64 bits.
        """
        held = dict(kernel_tensors(self.get_model()))
        return {"checksums": [str(checksum(held[name].narrow(0, first, n))) for name, first, n in json.loads(pieces)]}


def _names(files: list[Path]) -> list[str]:
    from safetensors import safe_open

    found: list[str] = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            found += tensors.keys()
    return found


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name)
