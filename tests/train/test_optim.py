"""The learning-rate schedule by hand, and which parameters go where."""

import copy
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.errors import SetupError
from train.config import OptimizerConfig
from train.optim import build_optimizers, check_optimizer, lr_scale

SCALES = [
    # step, total, warm-up share, final share, schedule, expected
    (0, 1000, 0.05, 0.0, "cosine", 1 / 50),
    (49, 1000, 0.05, 0.0, "cosine", 1.0),
    (50, 1000, 0.05, 0.0, "cosine", 1.0),
    (525, 1000, 0.05, 0.0, "cosine", 0.5),
    (1000, 1000, 0.05, 0.0, "cosine", 0.0),
    (2000, 1000, 0.05, 0.0, "cosine", 0.0),
    (525, 1000, 0.05, 0.1, "cosine", 0.55),
    (0, 10, 0.0, 0.0, "cosine", 1.0),
    (5, 10, 0.0, 0.0, "constant", 1.0),
    (0, 1, 0.05, 0.0, "cosine", 1.0),
    (0, 30, 0.05, 0.0, "cosine", 0.5),  # ceil(1.5) = 2 steps of warm-up
]


@pytest.mark.parametrize(("step", "total", "warmup", "final", "schedule", "expected"), SCALES)
def test_schedule(step: int, total: int, warmup: float, final: float, schedule: Any, expected: float) -> None:
    config = OptimizerConfig(warmup_share=warmup, final_lr_share=final, schedule=schedule)
    assert lr_scale(step, total, config) == pytest.approx(expected, abs=1e-12)


def test_every_parameter_is_optimized_once(make_model: Callable[[], Any]) -> None:
    for name in ("adamw", "muon"):
        model = make_model()
        optimizers = build_optimizers(model, OptimizerConfig(name=name))
        found = [p for part in optimizers.parts.values() for group in part.param_groups for p in group["params"]]
        assert len({id(p) for p in found}) == len(found) == len(list(model.parameters()))


def test_muon_takes_hidden_matrices_alone(make_model: Callable[[], Any]) -> None:
    model = make_model()
    optimizers = build_optimizers(model, OptimizerConfig(name="muon", lr=1e-3, muon_lr=0.02))
    taken = {id(p) for group in optimizers.parts["muon"].param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in taken}
    assert "model.embed_tokens.weight" not in names
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert not any("norm" in name or "conv1d" in name or name.endswith(("A_log", "dt_bias")) for name in names)
    optimizers.set_scale(0.5)
    assert [optimizers.parts[k].param_groups[0]["lr"] for k in ("adamw", "muon")] == [0.5e-3, 0.01]


def test_state_survives_a_round_trip_and_the_rate_is_the_configs(make_model: Callable[[], Any]) -> None:
    models = [make_model(), make_model()]
    config = OptimizerConfig(name="muon", lr=1e-3)
    first, second = (build_optimizers(model, config) for model in models)

    def step(model: Any, optimizers: Any, seed: int) -> None:
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizers.step()

    step(models[0], first, 1)
    step(models[1], second, 1)
    fresh = build_optimizers(models[1], OptimizerConfig(name="muon", lr=5e-4))
    fresh.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares the tensors otherwise
    assert fresh.parts["adamw"].param_groups[0]["lr"] == 5e-4
    fresh.parts["adamw"].param_groups[0]["lr"] = 1e-3
    step(models[0], first, 2)
    step(models[1], fresh, 2)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_fused_steps_are_the_same_to_rounding(make_model: Callable[[], Any]) -> None:
    plain, fused = make_model(), make_model()
    for model, config in ((plain, OptimizerConfig(lr=1e-3)), (fused, OptimizerConfig(lr=1e-3, fused=True))):
        optimizers = build_optimizers(model, config)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1) * (step + 1) + parameter.detach()
            optimizers.step()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_eight_bit_moments_step_nearly_the_same_and_survive_a_round_trip() -> None:
    torch.manual_seed(0)
    whole, eight = torch.nn.Linear(128, 96), torch.nn.Linear(128, 96)
    eight.load_state_dict(whole.state_dict())
    first, second = (
        build_optimizers(m, OptimizerConfig(name=n, lr=1e-3)) for m, n in ((whole, "adamw"), (eight, "adamw8bit"))
    )
    start = whole.weight.detach().clone()

    def step(models: Any, optimizers: Any, seed: int) -> None:
        torch.manual_seed(seed)
        gradients = [torch.randn_like(p) for p in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
            optimizer.step()

    for seed in range(10):
        step((whole, eight), (first, second), seed)
    moved = (whole.weight - start).norm()
    assert 0 < (whole.weight - eight.weight).norm() < 0.05 * moved
    torch.testing.assert_close(eight.bias, whole.bias)  # small tensors keep float32 moments
    saved = io.BytesIO()
    torch.save(second.state_dict(), saved)
    state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    moments = [
        p for part in second.parts.values() for s in part.state.values() for p in s.values() if torch.is_tensor(p)
    ]
    assert sum(p.numel() * p.element_size() for p in moments if p.dtype == torch.uint8) == 2 * 128 * 96
    resumed = torch.nn.Linear(128, 96)
    resumed.load_state_dict(eight.state_dict())
    third = build_optimizers(resumed, OptimizerConfig(name="adamw8bit", lr=1e-3))
    third.load_state_dict(state)
    step((eight, resumed), (second, third), 11)
    torch.testing.assert_close(resumed.weight, eight.weight, rtol=0, atol=0)


def test_a_missing_eight_bit_package_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install bitsandbytes"):
        check_optimizer(OptimizerConfig(name="adamw8bit"))
    check_optimizer(OptimizerConfig())
