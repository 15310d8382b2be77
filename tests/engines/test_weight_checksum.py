"""The checksum that proves a weight sync: by hand, under any change or exchange, in any layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engines.vllm_weights import checksum


def test_checksum_by_hand() -> None:
    # Bit patterns 1.0 -> 0x3f80, 2.0 -> 0x4000, -1.0 -> 0xbf80, as signed 16-bit numbers.
    numbers = torch.tensor([1.0, 2.0, -1.0], dtype=torch.bfloat16)
    assert checksum(numbers) == (1 * 0x3F80 + 3 * 0x4000 + 5 * (0xBF80 - 0x10000)) % 2**64
    assert checksum(torch.tensor([1.0])) == 0x3F800000
    assert checksum(torch.tensor([-0.0, 0.0])) == 0 == checksum(torch.empty(0))
    assert checksum(torch.tensor(1.0)) == 0x3F800000


@given(
    st.lists(st.floats(-1e3, 1e3, width=32).map(lambda x: x + 0.0), min_size=2, max_size=20, unique=True),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_any_change_and_any_exchange_changes_the_checksum(
    values: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = torch.tensor(values).to(dtype)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    changed = tensor.clone()
    changed[i] = tensor[j]
    assert (checksum(changed) == checksum(tensor)) == torch.equal(changed, tensor)
    changed[j] = tensor[i]
    assert (checksum(changed) == checksum(tensor)) == torch.equal(changed, tensor)


def test_the_checksum_does_not_depend_on_chunks_or_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.engines import vllm_weights

    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = checksum(tensor)
    assert checksum(tensor.T.contiguous().T) == whole
    monkeypatch.setattr(vllm_weights, "_CHUNK", 10)
    assert checksum(tensor) == whole
