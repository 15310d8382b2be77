"""Names, completeness and the proof of a weight sync, against an engine that lays its tensors out as vLLM does."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from shared.engines.base import Completion, Request, SamplingParams
from shared.errors import SetupError
from train.rollout_engines import SyncedEngine
from train.weight_sync import Piece, WeightSync, check_finite, checkpoint_names, fingerprint, plan_pieces

MakeModel = Callable[..., Qwen3_5ForCausalLM]

# Qwen3.5-2B: 18 gated-delta and 6 full-attention layers.
LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 6
SHAPE: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "layer_types": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
}


@pytest.fixture(scope="module")
def real() -> tuple[nn.Module, nn.Module]:
    """The text model that is trained and the base it comes from, in the real shape, without memory behind them."""
    config = Qwen3_5Config(text_config=SHAPE, vision_config=VISION, tie_word_embeddings=True)
    with torch.device("meta"):
        live, base = Qwen3_5ForCausalLM(config.text_config), Qwen3_5ForConditionalGeneration(config)
    live.tie_weights()
    base.tie_weights()
    return live, base


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_the_320_live_names_are_the_bases_own(real: tuple[nn.Module, nn.Module]) -> None:
    live, base = real
    names = checkpoint_names(shapes(live), conditional=True)
    assert len(names) == 320 == 18 * 14 + 6 * 11 + 2
    assert sum(parameter.numel() for parameter in live.parameters()) == 1_881_825_088
    assert len(set(names.values())) == 320
    language = {name: shape for name, shape in shapes(base).items() if not name.startswith("model.visual.")}
    assert {names[name]: shape for name, shape in shapes(live).items()} == language
    assert not any("lm_head" in name for name in names)


def test_in_the_real_shape_every_tensor_of_the_engine_is_covered(real: tuple[nn.Module, nn.Module]) -> None:
    live = shapes(real[0])
    engine = engine_shapes(live)
    pieces = plan_pieces(engine, live)
    assert {piece.live for piece in pieces} == live.keys()
    assert len(pieces) == 321  # the tied head as well
    assert Piece("language_model.model.layers.3.self_attn.qkv_proj.weight", LAYER_3_V, 4096 + 512, 512) in pieces


LAYER_3_V = "model.layers.3.self_attn.v_proj.weight"


def test_a_text_engine_takes_the_live_names_as_they_are(make_model: MakeModel) -> None:
    live = shapes(make_model())
    assert checkpoint_names(live, conditional=False) == {name: name for name in live}
    assert checkpoint_names([*live, "lm_head.weight"], conditional=True)["lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "module.model.norm.weight",
        "model.language_model.norm.weight",
        "model.visual.patch_embed.proj.weight",
        "base_model.model.model.norm.weight",
        "score.weight",
    ],
)
def test_a_name_without_a_place_is_refused(make_model: MakeModel, name: str) -> None:
    with pytest.raises(SetupError, match=f"weight sync: {name} is no tensor of a text model"):
        checkpoint_names([*shapes(make_model()), name], conditional=True)


# ---- an engine with vLLM's layout

ORDER = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}
FUSED_INTO = {part: fused for fused, parts in ORDER.items() for part in parts}


def engine_place(name: str) -> str:
    """Where vLLM keeps the live tensor `name`."""
    parts = name.split(".")
    return ".".join(["language_model", *(FUSED_INTO.get(part, part) for part in parts)])


def engine_shapes(live: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"visual.patch_embed.weight": (4, 4)}
    for name, (rows, *rest) in live.items():
        place = engine_place(name)
        before = found[place][0] if place in found else 0
        found[place] = (before + rows, *rest)
    rows, columns = live["model.embed_tokens.weight"]
    padded = (rows + 63) // 64 * 64
    found["language_model.model.embed_tokens.weight"] = (padded, columns)
    found["language_model.lm_head.weight"] = (padded, columns)
    return found


class FakeEngine:
    """Keeps bfloat16 copies (A_log in float32) as vLLM does; names in `skip` are silently not loaded."""

    batches_by_itself = True

    def __init__(self, live: nn.Module) -> None:
        self.weights: Callable[[], str] = lambda: ""
        self.model = nn.Module()
        for name, shape in engine_shapes(shapes(live)).items():
            module = self.model
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            dtype = torch.float32 if last == "A_log" else torch.bfloat16
            module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        head = self.model.get_submodule("language_model.lm_head")
        head.weight = self.model.get_parameter("language_model.model.embed_tokens.weight")
        self.skip: set[str] = set()
        self.loaded: list[str] = []
        self.calls: list[str] = []
        self.running: list[Request] = []

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append("load")
        self.loaded = []
        filled: dict[str, int] = {}
        tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in weights}
        order = [part for parts in ORDER.values() for part in parts]
        for name in sorted(tensors, key=lambda n: next((order.index(p) for p in n.split(".") if p in order), 0)):
            tensor, place = tensors[name], engine_place(name)
            first = filled.get(place, 0)
            filled[place] = first + tensor.shape[0]
            if name not in self.skip:
                self.model.get_parameter(place)[first : filled[place]].copy_(tensor)
                self.loaded.append(name)

    def inspect(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)

    def add(self, request: Request) -> None:
        self.calls.append("add")
        self.running.append(request)

    def step(self) -> list[Completion]:
        done, self.running = self.running, []
        return [Completion(request.request_id, (1,), (0.0,), "length", self.weights()) for request in done]

    def has_work(self) -> bool:
        return bool(self.running)

    def end_session(self, session: str) -> None:
        self.running = [request for request in self.running if request.session != session]

    def reset(self) -> None:
        self.running = []

    @torch.no_grad()
    def sleep(self) -> None:
        """Level 2: what comes back is whatever the memory holds."""
        self.calls.append("sleep")
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")


@torch.no_grad()
def shift(model: nn.Module, by: float = 0.01) -> None:
    for parameter in model.parameters():
        parameter.add_(by)


def test_a_sync_is_proven_tensor_by_tensor(make_model: MakeModel) -> None:
    model = make_model()
    engine = FakeEngine(model)
    sync = WeightSync(model, engine)
    with pytest.raises(RuntimeError, match="is not what the engine's"):
        sync.prove()
    sync.push()
    assert len(engine.loaded) == len(shapes(model)) == 3 * 14 + 11 + 2
    shift(model)
    with pytest.raises(RuntimeError, match=f"{len(sync.pieces)} of {len(sync.pieces)} pieces differ"):
        sync.prove()
    sync.push()
    sync.prove()


def test_whatever_tensor_is_skipped_silently_is_named(make_model: MakeModel) -> None:
    model = make_model()
    engine = FakeEngine(model)
    sync = WeightSync(model, engine)
    sync.push()
    for name in shapes(model):
        shift(model)
        engine.skip = {name}
        with pytest.raises(RuntimeError, match=f"weight sync: {name} is not what"):
            sync.push()


def test_exchanged_parts_of_a_fused_tensor_are_noticed(make_model: MakeModel) -> None:
    model = make_model()
    engine = FakeEngine(model)
    sync = WeightSync(model, engine)
    sync.push()
    fused = engine.model.get_parameter("language_model.model.layers.3.self_attn.qkv_proj.weight")
    rows = model.get_parameter(LAYER_3_V).shape[0]
    with torch.no_grad():
        keys, values = fused[-2 * rows : -rows].clone(), fused[-rows:].clone()
        fused[-2 * rows : -rows], fused[-rows:] = values, keys
    with pytest.raises(RuntimeError, match=r"k_proj.weight is not what .*\(2 of"):
        sync.prove()


def test_an_engine_of_another_model_is_refused(make_model: MakeModel) -> None:
    live = shapes(make_model())
    engine = engine_shapes(live)
    more = engine | {"language_model.model.layers.4.input_layernorm.weight": (32,)}
    with pytest.raises(SetupError, match=r"needs model\.layers\.4\.input_layernorm\.weight, which the trained model"):
        plan_pieces(more, live)
    fewer = {name: shape for name, shape in engine.items() if not name.endswith("layers.1.linear_attn.A_log")}
    with pytest.raises(SetupError, match=r"no place for model\.layers\.1\.linear_attn\.A_log \(1 such"):
        plan_pieces(fewer, live)
    name = "language_model.model.layers.2.mlp.down_proj.weight"
    with pytest.raises(SetupError, match="has shape"):
        plan_pieces(engine | {name: (32, 64)}, live)
    with pytest.raises(SetupError, match="has 33 rows in the engine, the trained model 32"):
        plan_pieces(engine | {name: (33, 48)}, live)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(make_model: MakeModel, value: float) -> None:
    model = make_model()
    engine = FakeEngine(model)
    sync = WeightSync(model, engine)
    sync.push()
    check_finite(model)
    with torch.no_grad():
        model.get_parameter("model.layers.2.linear_attn.dt_bias")[1] = value
    with pytest.raises(SetupError, match=r"model\.layers\.2\.linear_attn\.dt_bias holds 1 numbers that are not finite"):
        sync.push()
    assert engine.calls == ["load"]


# ---- when it happens


def synced(make_model: MakeModel, **options: bool) -> tuple[nn.Module, FakeEngine, SyncedEngine]:
    model = make_model()
    engine = FakeEngine(model)
    return model, engine, SyncedEngine(engine, WeightSync(model, engine), lambda: fingerprint(model), **options)


def request(name: str) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=1))


def test_the_first_request_after_a_change_loads_the_weights(make_model: MakeModel) -> None:
    model, engine, synced_engine = synced(make_model)
    for _ in range(2):
        for name in ("a", "b"):
            synced_engine.add(request(name))
        assert {done.weights for done in synced_engine.step()} == {fingerprint(model)}
    assert engine.calls == ["load", "add", "add", "add", "add"]
    before = fingerprint(model)
    shift(model)
    synced_engine.add(request("c"))
    (done,) = synced_engine.step()
    assert done.weights == fingerprint(model) != before
    assert synced_engine.syncs == 2


def test_an_engine_that_slept_loads_again_before_it_samples(make_model: MakeModel) -> None:
    """With an engine that pretends: vLLM's CPU build ignores being sent to sleep. Waking brings back NaN here."""
    model, engine, synced_engine = synced(make_model, sleeps=True)
    synced_engine.add(request("a"))
    synced_engine.step()
    synced_engine.reset()
    synced_engine.reset()
    assert engine.weights() == ""
    # The trainer's weights are the same as before; those in the engine are gone.
    synced_engine.add(request("b"))
    (done,) = synced_engine.step()
    assert done.weights == fingerprint(model)
    assert engine.calls == ["load", "add", "sleep", "wake", "load", "add"]


def test_an_engine_that_wakes_up_and_loads_nothing_serves_nobody(make_model: MakeModel) -> None:
    """Whatever it woke up with, its base weights say, is found out by the proof; pretended as well."""
    model, engine, synced_engine = synced(make_model, sleeps=True)
    base = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    synced_engine.add(request("a"))
    synced_engine.step()

    @torch.no_grad()
    def wake_with_base() -> None:
        for name, parameter in engine.model.named_parameters():
            parameter.copy_(base[name])

    engine.wake = wake_with_base  # type: ignore[method-assign]
    engine.skip = set(shapes(model))
    synced_engine.reset()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\d+ of 56 pieces differ"):
            synced_engine.add(request("b"))
    assert not synced_engine.has_work()
    assert engine.weights() == ""


def test_after_a_failed_sync_the_engine_serves_nobody(make_model: MakeModel) -> None:
    model, engine, synced_engine = synced(make_model)
    synced_engine.add(request("a"))
    synced_engine.step()
    shift(model)
    engine.skip = {LAYER_3_V}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=LAYER_3_V):
            synced_engine.add(request("b"))
    assert engine.weights() == ""
    assert not engine.has_work()
    engine.skip = set()
    synced_engine.add(request("c"))
    assert engine.weights() == fingerprint(model)


def test_weights_must_not_change_under_running_requests(make_model: MakeModel) -> None:
    model, _, synced_engine = synced(make_model)
    synced_engine.add(request("a"))
    shift(model)
    with pytest.raises(RuntimeError, match="under running requests"):
        synced_engine.add(request("b"))
    with pytest.raises(RuntimeError, match="under running requests"):
        synced_engine.step()
    synced_engine.reset()
    synced_engine.add(request("b"))
    assert len(synced_engine.step()) == 1
