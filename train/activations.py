"""What the layers of a decoder keep for their backward pass, measured on tensors that have shapes and no memory.

The model's own code runs, so what it keeps in float32 under autocast, or for the chunks of a recurrence, is counted as
it is. On a GPU, kernels in the place of transformers' PyTorch code (flash-linear-attention) keep less.
"""

import json
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModel

# Two lengths each: what does not grow with them (weights, their casts and gradients) is no activation. The highest
# point lies among the activations only where they outweigh the weights. No multiples of 64, the chunk of a recurrence:
# what is padded to it is copied, and an episode's length seldom is one.
_SHORT, _LONG = (100, 228), (1000, 2024)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes a token: `kept` between a layer's forward and backward pass, `peak` at the highest point of the two."""

    kept: int
    peak: int


def layer_memory(config: Any, kind: str, dtype: torch.dtype, autocast: bool) -> LayerMemory:
    """For a layer of that kind (an entry of `layer_types`) of a transformers config, with weights of that dtype."""
    return _measured(json.dumps(config.get_text_config().to_dict(), sort_keys=True, default=str), kind, dtype, autocast)


@lru_cache(maxsize=32)
def _measured(config: str, kind: str, dtype: torch.dtype, autocast: bool) -> LayerMemory:
    settings: dict[str, Any] = json.loads(config)

    def growth(lengths: tuple[int, int], backward: bool) -> int:
        short, long = (_bytes(settings, kind, n, dtype, autocast, backward) for n in lengths)
        return (long - short) // (lengths[1] - lengths[0])

    # What a layer returns is the next one's input, and counted there.
    output = int(settings["hidden_size"]) * dtype.itemsize
    return LayerMemory(growth(_SHORT, False) - output, growth(_LONG, True))


def _bytes(config: dict[str, Any], kind: str, tokens: int, dtype: torch.dtype, autocast: bool, backward: bool) -> int:
    """Bytes that one layer holds after its forward pass, or the most that it ever holds in both passes."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None}
    if config.get("layer_types") is not None:
        changes["layer_types"] = [kind]
    text = AutoConfig.for_model(**{**config, **changes})
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracker's, about modules that it does not know
        decoder = AutoModel.from_config(text, dtype=dtype).train()
        layer = decoder.layers[0]
        hidden = torch.zeros(1, tokens, text.hidden_size, dtype=dtype, requires_grad=True)
        # The layer itself: the decoder around it would make a mask, since it cannot look into such tensors.
        rotary = decoder.rotary_emb(hidden, torch.arange(tokens)[None])
        tracker = MemTracker()
        tracker.track_external(layer, hidden)
        with tracker:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = layer(hidden, position_embeddings=rotary, attention_mask=None)
            if backward:
                output.sum().backward()
        (device,) = tracker.get_tracker_snapshot("peak" if backward else "current").values()
        return int(device["Total"])
