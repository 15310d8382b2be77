"""Chunked log-probabilities against the plain formula: values, gradients, memory, padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from train.logprobs import LogprobModel, selected_logprobs


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 23])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_values_and_gradients_equal_full_logits(n: int, chunk: int) -> None:
    torch.manual_seed(n)
    weight = torch.randn(50, 12, requires_grad=True)
    hidden = torch.randn(n, 12, requires_grad=True)
    targets = torch.randint(0, 50, (n,))
    upstream = torch.randn(n)
    results = []
    for function in (_plain, lambda h, w, t: selected_logprobs(h, w, t, chunk)):
        weight.grad = hidden.grad = None
        values = function(hidden, weight, targets)
        (values * upstream).sum().backward()
        results.append((values.detach(), weight.grad, hidden.grad))
    for ours, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_gradcheck_in_double_precision_of_the_inputs() -> None:
    """The sums are float32, so the finite differences are taken coarsely."""
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (5,))
    assert torch.autograd.gradcheck(
        lambda h, w: selected_logprobs(h, w, targets, 2).double(), (hidden, weight), eps=1e-2, atol=1e-3, rtol=1e-2
    )


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    selected_logprobs(hidden, weight, torch.tensor([0, 1, 2])).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(300, 16).bfloat16()
    targets = torch.randint(0, 300, (40,))
    values = selected_logprobs(hidden, weight, targets, 8)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, _plain(hidden, weight, targets), rtol=1e-3, atol=1e-3)


def test_a_float32_weight_serves_bfloat16_hidden_states_and_gets_a_float32_gradient() -> None:
    weight = torch.randn(30, 8, requires_grad=True)
    hidden = torch.randn(6, 8).bfloat16().requires_grad_(True)
    selected_logprobs(hidden, weight, torch.arange(6), 4).sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert weight.grad.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16


def test_the_peak_stays_at_a_few_chunks_of_logits() -> None:
    """Saved for the backward pass: no tensor with a vocabulary dimension but the weight."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_logprobs(hidden, weight, torch.zeros(512, dtype=torch.long), 32)
    assert sorted(saved) == sorted([(512, 8), (4096, 8), (512,), (512,)])


def test_model_logprobs_equal_the_full_softmax(make_model: Callable[[], Any]) -> None:
    model = make_model()
    torch.manual_seed(1)
    ids = torch.randint(0, 256, (3, 70))
    mask = torch.rand(3, 70) < 0.5
    values = LogprobModel(model, 16)(ids, mask)
    full = torch.log_softmax(model(ids).logits.float(), -1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(values[:, 1:], full * mask[:, 1:], rtol=1e-4, atol=1e-5)
    assert values[:, 0].eq(0).all()


def test_right_padding_changes_neither_values_nor_gradients(make_model: Callable[[], Any]) -> None:
    """Rows of a padded batch against each row alone, through linear-attention and full-attention layers."""
    torch.manual_seed(2)
    lengths = [70, 64, 5, 2]
    rows = [torch.randint(0, 256, (n,)) for n in lengths]
    masks = [torch.rand(n) < 0.6 for n in lengths]
    batch_model, row_model = make_model(), make_model()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_value=False)
    together = LogprobModel(batch_model)(ids, mask)
    together.sum().backward()
    for b, n in enumerate(lengths):
        alone = LogprobModel(row_model)(rows[b][None], masks[b][None])
        alone.sum().backward()
        torch.testing.assert_close(together[b, :n], alone[0], rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(batch_model.named_parameters(), row_model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
