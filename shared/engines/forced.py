"""Log-probabilities of given tokens: what a model says of a text that another, or it itself, has sampled before."""

from collections.abc import Sequence
from typing import Any

import torch

from shared.engines.hf import HFEngine
from shared.engines.vllm import VLLMEngine

# Positions whose logits exist at a time: 512 x 248,320 numbers are 485 MiB in float32.
_POSITIONS = 512


def forced_logprobs(engine: HFEngine | VLLMEngine, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each sequence of n ids, n - 1 natural log-probs: entry i is that of id i + 1 after all before it.

    Under the full softmax at temperature 1. vLLM leaves out the last one of a sequence that fills its context, since
    it must have room for one token more.
    """
    if isinstance(engine, HFEngine):
        return [_with_transformers(engine.model, ids) for ids in sequences]
    return _with_vllm(engine, sequences)


@torch.no_grad()
def _with_transformers(model: Any, ids: Sequence[int]) -> list[float]:
    """One forward over the whole sequence; the head is applied to some positions at a time."""
    given = torch.tensor([list(ids)], device=model.device)
    hidden = model.get_decoder()(input_ids=given, use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    found: list[float] = []
    for first in range(0, len(hidden), _POSITIONS):
        logits = head(hidden[first : first + _POSITIONS]).float()
        wanted = given[0, first + 1 : first + 1 + len(logits), None]
        found += (logits.gather(1, wanted)[:, 0] - logits.logsumexp(1)).tolist()
    return found


def _with_vllm(engine: VLLMEngine, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """One at a time, so that no other sequence is in the batch; the one token that vLLM must sample is dropped."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for ids in sequences:
        prompt = list(ids[: engine.max_model_len - 1])
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        entries = list(output.prompt_logprobs)[1:]
        found.append([float(entry[token].logprob) for entry, token in zip(entries, prompt[1:], strict=True)])
    return found
