"""The tiny base folder is laid out as the real one, loads as the real one does, and starts out able to look up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from shared.chat import TokenizerCodec
from shared.errors import SetupError
from train.config import ModelConfig
from train.model import Policy, load_codec, load_model, save_policy
from train.tiny import LAYOUTS, Layout, main, write_base

MTP = {
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    *(f"mtp.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"mtp.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"mtp.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A base folder of each layout."""
    layout: Layout = request.param
    folder = tmp_path_factory.mktemp("base") / layout
    write_base(folder, seed=1, layout=layout)
    return layout, folder


def read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def test_tensors_are_named_as_in_the_published_checkpoints(base: tuple[str, Path]) -> None:
    layout, folder = base
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    assert len(MTP) == 15
    assert {name for name in names if name.startswith("mtp.")} == MTP
    assert {name for name in names if name.startswith("model.visual.")}
    assert all(name.startswith(("mtp.", "model.visual.", "model.language_model.")) for name in names)
    assert "lm_head.weight" not in names
    kinds = [
        "linear_attention"
        if f"model.language_model.layers.{i}.linear_attn.A_log" in names
        else "full_attention"
        if f"model.language_model.layers.{i}.self_attn.q_proj.weight" in names
        else None
        for i in range(len(LAYOUTS[layout]))
    ]
    assert tuple(kinds) == LAYOUTS[layout]


def test_configs_say_what_the_weights_are(base: tuple[str, Path]) -> None:
    layout, folder = base
    config = read_json(folder / "config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["tie_word_embeddings"] is True
    assert tuple(config["text_config"]["layer_types"]) == LAYOUTS[layout]
    assert config["text_config"]["vocab_size"] == len(tokenizer)
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    for key, token in (("image_token_id", "<|image_pad|>"), ("vision_start_token_id", "<|vision_start|>")):
        assert config[key] == tokenizer.convert_tokens_to_ids(token)
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert read_json(folder / "generation_config.json")["eos_token_id"] == stops
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert read_json(folder / name)["patch_size"] == config["vision_config"]["patch_size"]
    rope = config["text_config"]["rope_parameters"]
    pairs = int(config["text_config"]["head_dim"] * rope["partial_rotary_factor"]) // 2
    assert sum(rope["mrope_section"]) == pairs


def test_the_whole_model_loads_without_a_missing_weight(base: tuple[str, Path]) -> None:
    _, folder = base
    _, info = Qwen3_5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not info["unexpected_keys"]


def test_the_text_class_loads_from_it_and_computes(base: tuple[str, Path]) -> None:
    layout, folder = base
    model = load_model(ModelConfig(path=str(folder)))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    linear = [module for module in model.modules() if isinstance(module, Qwen3_5GatedDeltaNet)]
    assert len(linear) == LAYOUTS[layout].count("linear_attention")
    ids = torch.arange(2 * 80).reshape(2, 80) % model.config.vocab_size
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients.values())


def test_a_text_checkpoint_keeps_tokenizer_and_template(base: tuple[str, Path], tmp_path: Path) -> None:
    """transformers loads the tokenizer of the two folders by different rules; both must give ours."""
    _, folder = base
    tokenizer, codec = load_codec(str(folder))
    save_policy(Policy(load_model(ModelConfig(path=str(folder))), tokenizer, codec), tmp_path / "text")
    saved = AutoTokenizer.from_pretrained(tmp_path / "text")
    assert saved.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert TokenizerCodec(saved).template_sha256 == codec.template_sha256
    text = "<think>\nNext: answer.\n</think>\n\n"
    assert saved(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert len(tokenizer("Next: answer.\n")["input_ids"]) == 1


def test_bytes_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_base(tmp_path / name, seed)
        torch.rand(7)
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc"}
    assert files["a"] == files["b"]
    a, c = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert a.keys() == c.keys()
    assert not torch.equal(a["mtp.fc.weight"], c["mtp.fc.weight"])
    torch.random.set_rng_state(state)
    write_base(tmp_path / "d", 3)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_fresh_model_proposes_what_followed_before(layout: Layout, tmp_path: Path) -> None:
    """Before any training, "a b … a" makes b likelier than the other tokens seen: `initialise` gives looking up."""
    write_base(tmp_path / "base", seed=0, layout=layout)
    model = load_model(ModelConfig(path=str(tmp_path / "base")))
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for _ in range(40):
        tokens = torch.randperm(400, generator=generator)[:13] + 50
        position = int(torch.randint(0, 11, (1,), generator=generator))
        ids = torch.cat([tokens, tokens[position : position + 1]])[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        others = torch.cat([tokens[:position], tokens[position + 1 :]])  # the repeated token itself is no candidate
        ranks.append(int((logits[others] > logits[tokens[position + 1]]).sum()))
    # 12 candidates: by chance the mean rank would be 5.5.
    assert sum(ranks) / len(ranks) < 2.5


def test_a_folder_in_use_and_an_unknown_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(SetupError, match="exists already"):
        write_base(tmp_path / "used")
    with pytest.raises(SetupError, match="layout 'dense' does not exist"):
        write_base(tmp_path / "new", layout="dense")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="cannot be written"):
        write_base(tmp_path / "used" / "file" / "inside")
    assert not (tmp_path / "new").exists()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "base"), "--seed", "2", "--layout", "canonical"])
    assert "linear_attention, linear_attention, linear_attention, full_attention" in capsys.readouterr().out
