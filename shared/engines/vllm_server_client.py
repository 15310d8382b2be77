"""Asking a vLLM server (shared/engines/vllm_server.py) for completions, and replacing its weights, over HTTP.

Completions come from vLLM's own /inference/v1/generate: token ids in, token ids out, and with them the label of the
weights that sampled each token. A trainer gives the label after it has proven what was loaded, so a server that was
started anew, or has been given other weights, says so with every completion.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.engines.base import Completion, Request
from shared.engines.http import Refused, Server
from shared.errors import SetupError

# The label while weights are replaced, and after a load that was not proven.
UNPROVEN = "unproven"
_START = "start it with: python -m shared.engines.vllm_server MODEL --port PORT"
_SEED_MASK = 2**63 - 1
Rows = tuple[str, int, int]


@dataclass(frozen=True)
class VllmServer:
    """One server. `completions` and `control` are the same address, with patience for many answers and for few."""

    completions: Server
    control: Server

    @classmethod
    def at(cls, address: str, *, patience: float = 60.0) -> "VllmServer":
        """The server at `address`; `patience` in seconds bounds how long a failing completion is asked for again."""
        return cls(Server(address, timeout=1800.0, patience=patience), Server(address, timeout=1800.0, patience=10.0))

    @property
    def address(self) -> str:
        """Where it is, as people write it."""
        return self.control.base_url.removesuffix("/v1")

    def check(self, max_tokens: int) -> None:
        """SetupError when it is not there, cannot take weights, is spread over GPUs, or holds shorter contexts."""
        size = self._ask("/get_world_size").get("world_size")
        if size != 1:
            raise SetupError(
                f"the server at {self.address} is spread over {size} GPUs; weights go to servers of one: start more"
            )
        models = self.control.get("/models").get("data") or [{}]
        longest = models[0].get("max_model_len") or 0
        if longest < max_tokens:
            raise SetupError(
                f"the server at {self.address} holds contexts of {longest} tokens, episodes have {max_tokens}: "
                f"start it with --max-model-len {max_tokens}"
            )

    def describe(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type ("bfloat16") of each tensor by its name in vLLM."""
        tensors = self._call("describe_weights")["tensors"]
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}

    def label(self) -> str:
        """The label of its weights; one that nobody has labelled says "default"."""
        return str(self._ask("/weight_info").get("weight_version"))

    def load(self, files: Sequence[Path], names: Sequence[str], pieces: Sequence[Rows]) -> list[int]:
        """Replace the weights by the tensors `names` in `files`; returns the checksums of `pieces` as it then has them.

        What was being sampled is aborted, all prefixes are forgotten, and the label stays `UNPROVEN` until `vouch`.
        SetupError when the server refuses or does not see the files.
        """
        self._set_label(UNPROVEN)
        self._ask("/pause?mode=abort", {})
        self._call("receive_weights", json.dumps([str(file) for file in files]), json.dumps(list(names)))
        if not self._ask("/reset_prefix_cache", {}).get("success"):
            raise SetupError(f"the server at {self.address} does not forget its prefixes: start it anew")
        return [int(text) for text in self._call("checksum_weights", json.dumps(list(pieces)))["checksums"]]

    def vouch(self, label: str) -> None:
        """The weights are proven: completions come again, with this label."""
        self._set_label(label)
        self._ask("/resume", {})

    def sample(self, request: Request, label: str) -> Completion:
        """One completion, sampled by the weights `label` from its first token to its last. SetupError otherwise."""
        params = request.params
        body = {
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "max_tokens": params.max_tokens,
                # vLLM wants a seed that fits a signed 64-bit integer.
                "seed": params.seed & _SEED_MASK,
                "stop_token_ids": list(params.stop_token_ids),
                # Only the stops of the request count, not those of the model folder.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        answer = self._asked(lambda: self.completions.beside("/inference/v1/generate", body))
        try:
            (choice,) = answer["choices"]
            ids = tuple(int(token) for token in choice["token_ids"])
            entries = choice["logprobs"]["content"]
            logprobs = tuple(float(entry["logprob"]) for entry in entries)
            same = ids == tuple(entry["token_id"] for entry in entries)
            versions = {span["version"] for span in choice["weight_versions"]}
        except (KeyError, TypeError, ValueError) as error:
            raise SetupError(f"the server at {self.address} answers without ids and weights ({error!r})") from None
        if versions != {label}:
            raise SetupError(
                f"the server at {self.address} samples with the weights {', '.join(sorted(versions))} and not with "
                f"{label}: it was started anew, or another run uses it. Start this run again, it continues"
            )
        reason = choice.get("finish_reason")
        if not ids or not same or reason not in ("stop", "length"):
            raise SetupError(f"the server at {self.address} broke a completion off ({reason}): see its log")
        return Completion(request.request_id, ids, logprobs, "length" if reason == "length" else "stop", label)

    def _set_label(self, label: str) -> None:
        self._ask("/update_weight_version", {"new_version": label})

    def _call(self, method: str, *arguments: str) -> dict[str, Any]:
        """What our worker's method answers."""
        results = self._ask("/collective_rpc", {"method": method, "args": arguments}).get("results")
        answer = results[0] if isinstance(results, list) and results else None
        if not isinstance(answer, dict):
            raise SetupError(f"the server at {self.address} does not know {method}: {_START}")
        if "error" in answer:
            raise SetupError(f"the server at {self.address} cannot {method.replace('_', ' ')}: {answer['error']}")
        return answer

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._asked(lambda: self.control.beside(path, body))

    def _asked(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return ask()
        except Refused as error:
            remedy = f"; {_START}" if error.status == 404 else ""
            raise SetupError(f"the server at {self.address} refuses ({error.status}: {error}){remedy}") from None
