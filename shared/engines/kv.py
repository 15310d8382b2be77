"""Row operations on a transformers cache: take rows out, put rows in, drop what is only padding.

Rows of a batch are aligned at the right: row `b` with `n` tokens occupies the last `n` of the cache's
columns. Attention layers hold keys and values of shape (rows, heads, columns, head_dim); linear-attention
layers hold convolution and recurrent states of shape (rows, ...), which have no columns.
"""

import copy

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from shared.errors import SetupError


def check_supported(cache: DynamicCache) -> None:
    """SetupError unless every layer is plain attention or linear attention."""
    for layer in cache.layers:
        if type(layer) is not DynamicLayer and type(layer) is not LinearAttentionLayer:
            raise SetupError(
                f"this model's cache has a {type(layer).__name__}, which the HF engine cannot batch; use vLLM"
            )


def take(cache: DynamicCache, rows: list[int], width: int) -> DynamicCache:
    """A new cache of the given rows, with only the last `width` columns."""
    result = copy.copy(cache)
    result.layers = [_take_layer(layer, rows, width) for layer in cache.layers]
    return result


def _take_layer(layer: DynamicLayer | LinearAttentionLayer, rows: list[int], width: int) -> object:
    new = copy.copy(layer)
    if isinstance(layer, LinearAttentionLayer):
        index = torch.tensor(rows, device=layer.device)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            setattr(new, name, {i: s if s is None else s.index_select(0, index) for i, s in states.items()})
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(new, name, dict(getattr(layer, name)))
        return new
    index = torch.tensor(rows, device=layer.keys.device)
    new.keys = layer.keys[:, :, layer.keys.shape[2] - width :].index_select(0, index)
    new.values = layer.values[:, :, layer.values.shape[2] - width :].index_select(0, index)
    return new


def join(caches: list[DynamicCache], width: int) -> DynamicCache:
    """One cache with the rows of all of them in order, padded at the left to `width` columns."""
    if len(caches) == 1 and _width(caches[0]) in (None, width):
        return caches[0]
    result = copy.copy(caches[0])
    result.layers = [_join_layer([cache.layers[i] for cache in caches], width) for i in range(len(caches[0].layers))]
    return result


def _width(cache: DynamicCache) -> int | None:
    return next((layer.keys.shape[2] for layer in cache.layers if isinstance(layer, DynamicLayer)), None)


def _join_layer(layers: list[DynamicLayer | LinearAttentionLayer], width: int) -> object:
    new = copy.copy(layers[0])
    if isinstance(layers[0], LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            parts = [getattr(layer, name) for layer in layers]
            setattr(new, name, {i: s if s is None else torch.cat([p[i] for p in parts]) for i, s in parts[0].items()})
        return new
    new.keys = torch.cat([_pad_left(layer.keys, width) for layer in layers])
    new.values = torch.cat([_pad_left(layer.values, width) for layer in layers])
    return new


def _pad_left(states: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
