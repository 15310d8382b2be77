"""A model folder through eval.run: a tiny model with random weights, so only the path is judged, not the score."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval import ask, replay
from eval.config import parse_arguments
from eval.models import check_model_folder, model_sha256, resolve_model
from eval.records import read_episodes
from eval.run import evaluate
from shared.errors import SetupError
from tests.eval.runs import arguments
from tests.tokenizers import byte_tokenizer, template


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand parameters with a byte tokenizer and Qwen3.5's template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(template("qwen3_5_think"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHORT = ("--engine", "hf", "--limit", "2", "--max-turns", "2", "--max-new-tokens", "12", "--max-tokens", "8192")


def evaluate_model(data: Path, out: Path, model: Path, *more: str) -> dict[str, Any]:
    return evaluate(parse_arguments(arguments(data, out, *SHORT, "--model", str(model), *more)))


def test_a_model_folder_runs_from_end_to_end(data: Path, tmp_path: Path, model: Path) -> None:
    summary = evaluate_model(data, tmp_path / "out", model)
    assert (summary["n"], summary["truncation_rate"]) == (2, 1.0)
    assert summary["identity"]["model_sha256"] == model_sha256(model)
    assert {"torch", "transformers"} <= summary["identity"]["versions"].keys()
    for episode in read_episodes(tmp_path / "out" / "episodes.jsonl"):
        assert len(episode["turns"]) == 3
        assert episode["sampled_tokens"] == sum(turn["n_tokens"] for turn in episode["turns"]) <= 36
        assert episode["weights"] == [model_sha256(model)[:16]]


def test_the_same_seed_gives_the_same_episodes(data: Path, tmp_path: Path, model: Path) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        evaluate_model(data, tmp_path / name, model, "--seed", seed)
    a, b, c = ((tmp_path / name / "episodes.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_changed_weights_do_not_resume_a_run(data: Path, tmp_path: Path, model: Path) -> None:
    evaluate_model(data, tmp_path / "out", model)
    (tmp_path / "out" / "summary.json").unlink()
    config = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(SetupError, match="differs in model, model_sha256"):
        evaluate_model(data, tmp_path / "out", other)


def test_a_folder_with_half_of_its_weights_is_refused(data: Path, tmp_path: Path, model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    content = (model / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(SetupError, match=r"model\.safetensors is damaged \(.*copy or download it again"):
        evaluate_model(data, tmp_path / "out", broken)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    check_model_folder(broken)
    with pytest.raises(SetupError, match=r"lacks 1 weights of its model, model\.norm\.weight"):
        evaluate_model(data, tmp_path / "out", broken)
    assert not (tmp_path / "out").exists()


def test_a_model_is_a_folder_or_in_the_local_cache(tmp_path: Path, model: Path) -> None:
    assert resolve_model(str(model)) == model
    (tmp_path / "file").write_text("")
    for name, message in ((str(tmp_path / "file"), "is a file"), ("./nothing", "does not exist")):
        with pytest.raises(SetupError, match=message):
            resolve_model(name)


def test_a_models_run_replays_without_the_model(data: Path, tmp_path: Path, model: Path) -> None:
    evaluate_model(data, tmp_path / "out", model)
    assert replay.main([str(tmp_path / "out")]) == 0
    evaluate_model(data, tmp_path / "cut", model, "--max-tokens", "1500", "--max-turns", "6")
    assert {episode["ended"] for episode in read_episodes(tmp_path / "cut" / "episodes.jsonl")} == {"token_limit"}
    assert replay.main([str(tmp_path / "cut")]) == 0


def test_a_model_is_asked_live(data: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(model), "--db", str(data / "databases" / "shop" / "shop.sqlite"), "--max-turns", "1"]
    assert ask.main([*argv, "--max-new-tokens", "8", "--max-tokens", "8192", "Which items?"]) == 1
    said = capsys.readouterr().out
    assert "turn 1: 8 tokens" in said
    assert "closing turn" in said


# Runs eval.run's main with every way out of the machine recorded in a file, then refused or left hanging.
TRAPPED = """
import runpy, socket, sys, time
attempts, hang = sys.argv[1], sys.argv[2] == "hang"
def trap(target):
    open(attempts, "a").write(repr(target) + "\\n")
    if hang:
        time.sleep(600)
    raise OSError(f"no way out to {target}")
def guarded(original):
    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            trap(address)
        return original(self, address)
    return connect
socket.socket.connect = guarded(socket.socket.connect)
socket.socket.connect_ex = guarded(socket.socket.connect_ex)
socket.getaddrinfo = lambda host, *rest, **named: trap(host)
sys.argv = ["eval.run", *sys.argv[3:]]
runpy.run_module("eval.run", run_name="__main__")
"""


@pytest.mark.parametrize("mode", ["raise", "hang"])
def test_an_evaluation_never_reaches_for_the_network(data: Path, tmp_path: Path, model: Path, mode: str) -> None:
    attempts, home = tmp_path / "attempts", tmp_path / "home"
    home.mkdir()
    # Without the variable that the other tests set, without proxies or caches: a plain user's environment.
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
    options = arguments(data, tmp_path / "out", *SHORT, "--model", str(model))
    command = [sys.executable, "-c", TRAPPED, str(attempts), mode, *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not attempts.exists(), attempts.read_text()
    assert (tmp_path / "out" / "summary.json").is_file()
