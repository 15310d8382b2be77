"""Adapters: the start underneath is untouched, everyone else sees a merged model, and a run resumes where it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shared.errors import SetupError
from tests.train.scripted_run import assert_same_run, finish, make_config, metrics, shop_pool
from train.config import LoraConfig
from train.live import live_tensors
from train.logprobs import LogprobModel
from train.lora import adapted_layers, add_adapters, check_targets, is_adapter, without_adapters
from train.model import load_policy
from train.state import read_state
from train.trainer import AdaptersOff
from train.weight_sync import checkpoint_names, fingerprint

MakeModel = Callable[..., Any]
LORA = "model.lora={rank: 4, alpha: 8}"


@pytest.fixture
def adapted(make_model: MakeModel) -> Any:
    """A model whose adapters do something."""
    model = make_model()
    add_adapters(model, LoraConfig(rank=4, alpha=8))
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.2)
    return model


@pytest.fixture
def text(make_model: MakeModel) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(0, make_model().config.vocab_size, (2, 20))
    return ids, torch.ones_like(ids, dtype=torch.bool)


def test_without_adapters_it_is_the_start_bit_for_bit(adapted: Any, make_model: MakeModel, text: Any) -> None:
    with torch.no_grad():
        start, reference = LogprobModel(make_model())(*text), AdaptersOff(LogprobModel(adapted))(*text)
        assert torch.equal(reference, start)
        assert not torch.allclose(LogprobModel(adapted)(*text), start, atol=1e-3), "and with them it is not"


def test_gradients_reach_adapters_alone_and_all_of_them(adapted: Any, text: Any) -> None:
    with without_adapters(adapted):
        pass  # switching off and on again leaves them trainable
    LogprobModel(adapted)(*text).sum().backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == is_adapter(name), name


def test_every_linear_layer_of_the_decoder_has_one(adapted: Any) -> None:
    names = set(adapted_layers(adapted))
    assert {name.rpartition(".")[2] for name in names} >= {"q_proj", "o_proj", "in_proj_qkv", "out_proj", "down_proj"}
    assert not any("lm_head" in name or "embed" in name for name in names)
    assert all(p.dtype == torch.float32 for name, p in adapted.named_parameters() if is_adapter(name))


def test_to_all_others_it_is_a_merged_model(adapted: Any, make_model: MakeModel, text: Any) -> None:
    live = live_tensors(adapted)
    merged = make_model()
    assert list(live) == [name for name, _ in merged.named_parameters()], "names and order of the text model"
    assert checkpoint_names(live, True) == checkpoint_names(dict(merged.named_parameters()), True)
    before = {name: p.detach().clone() for name, p in merged.named_parameters()}
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            assert live[name].shape == parameter.shape
            parameter.copy_(live[name].value())
    changed = {
        name.removesuffix(".weight") for name, p in merged.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed == set(adapted_layers(adapted))
    with torch.no_grad():
        torch.testing.assert_close(LogprobModel(merged)(*text), LogprobModel(adapted)(*text), atol=1e-4, rtol=0)


def test_the_fingerprint_follows_every_adapter(adapted: Any) -> None:
    seen = {fingerprint(adapted)}
    for layer in adapted_layers(adapted).values():
        with torch.no_grad():
            layer.lora_A["default"].weight.add_(0.01)
        seen.add(fingerprint(adapted))
    assert len(seen) == 1 + len(adapted_layers(adapted))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    finish(folder, model_folder, LORA)
    return folder


def test_a_run_trains_and_its_kl_starts_at_zero(trained: Path) -> None:
    lines = metrics(trained)
    assert lines[0]["kl"] == 0.0
    assert lines[-1]["kl"] > 1e-5
    assert len({line["weights"] for line in lines}) == 5
    assert max(line["gap_mean"] for line in lines) < 1e-4


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, model_folder: Path, trained: Path) -> None:
    finish(tmp_path, model_folder, LORA, "steps=2", "planned_steps=5")
    assert_same_run(finish(tmp_path, model_folder, LORA), metrics(trained))


def test_a_checkpoint_is_a_merged_folder_and_peft_merges_its_adapter_alike(trained: Path, model_folder: Path) -> None:
    folder = trained / "run" / "checkpoint-step-5"
    merged = load_file(folder / "model.safetensors")
    start = load_file(model_folder / "model.safetensors")
    assert merged.keys() == start.keys()
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(merged[name], parameter.detach(), rtol=0, atol=1e-7)
    assert sum(not torch.equal(merged[name], start[name]) for name in start) > 10
    assert (
        fingerprint(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        == metrics(trained)[-1]["weights"]
    )


def test_a_run_does_not_change_between_adapters_and_all_weights(
    tmp_path: Path, model_folder: Path, trained: Path, finished: Path
) -> None:
    for folder, more, message in (
        (trained, [], "was trained with model.lora"),
        (finished, [LORA], "was trained without model.lora"),
        (trained, ["model.lora={rank: 8, alpha: 8}"], "another rank or other targets"),
    ):
        config = make_config(folder, model_folder, more)
        step, path = 5, folder / "run" / "checkpoint-step-5"
        assert read_state(step, path, config, _pool_hash(folder))
        with pytest.raises(SetupError, match=message):
            load_policy(config.model, str(path))


def _pool_hash(folder: Path) -> str:
    return shop_pool(folder).content_hash


def test_a_target_that_is_no_layer_is_refused_before_anything_is_loaded(model_folder: Path) -> None:
    with pytest.raises(SetupError, match=r"model\.lora\.targets: no linear layer is named query; there are .*q_proj"):
        check_targets(model_folder, LoraConfig(targets=("q_proj", "query")))
    check_targets(model_folder, LoraConfig(targets=("q_proj",)))


@pytest.mark.parametrize("more", ["loss.kl.offload=true", "parallel=fsdp"])
def test_what_does_not_go_with_adapters(tmp_path: Path, model_folder: Path, more: str) -> None:
    with pytest.raises(SetupError, match=r"model\.lora"):
        make_config(tmp_path, model_folder, [LORA, more])


def test_only_what_is_trained_has_moments(trained: Path) -> None:
    state = torch.load(trained / "run" / "checkpoint-step-5" / "train_state.pt", weights_only=True)
    adapter = load_file(trained / "run" / "checkpoint-step-5" / "adapter" / "adapter_model.safetensors")
    moments = state["optimizers"]["adamw"]["state"].values()
    assert sum(values["exp_avg"].numel() for values in moments) == sum(tensor.numel() for tensor in adapter.values())
