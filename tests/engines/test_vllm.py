"""The vLLM engine on a tiny model of the real architecture, against transformers in float32.

vLLM computes in bfloat16, the gated-delta kernel takes nothing else; so log-probs agree to a tolerance, and a greedy
token may differ only where the model hardly prefers one over the other.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.config import parse_arguments
from eval.engines import parse_options, prepare_engine
from shared.errors import SetupError
from tests.engines.vllm_here import ENVIRONMENT, need_vllm

ROOT = Path(__file__).resolve().parents[2]
# Nats. Seen here: mean 0.03, largest 0.15.
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.06, 0.6

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    from tests.engines.tiny_export import write_export

    return write_export(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def scenes(export: Path, home: Path) -> dict[str, Any]:
    """What tests/engines/vllm_scenes.py saw."""
    out = home.parent / "scenes.json"
    result = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm_scenes", str(export), str(out)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
        | ENVIRONMENT
        | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def reference(export: Path) -> Any:
    """log_softmax of the model in float32 over a list of ids, by position."""
    import torch
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(export, dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)

    return logprobs


def differences(reference: Any, completions: list[dict[str, Any]]) -> list[float]:
    """|log-prob of vLLM - log-prob of the reference| of every sampled token."""
    found = []
    for completion in completions:
        start = len(completion["prompt"])
        expected = reference([*completion["prompt"], *completion["token_ids"]])
        for k, (token, logprob) in enumerate(zip(completion["token_ids"], completion["logprobs"], strict=True)):
            found.append(abs(logprob - float(expected[start + k - 1, token])))
    return found


def test_logprobs_are_the_full_softmax_of_the_model(scenes: dict[str, Any], reference: Any) -> None:
    turns = [turn for session in scenes["sessions"]["turns"].values() for turn in session]
    found = differences(reference, [*turns, *scenes["stops"], *scenes["long"]])
    assert len(found) > 400
    assert sum(found) / len(found) < MEAN_DIFFERENCE
    assert max(found) < LARGEST_DIFFERENCE


def test_a_greedy_token_is_the_models_own_or_nearly_as_likely(scenes: dict[str, Any], reference: Any) -> None:
    same, margins = 0, []
    for completion in scenes["greedy"]:
        start = len(completion["prompt"])
        expected = reference([*completion["prompt"], *completion["token_ids"]])
        for k, token in enumerate(completion["token_ids"]):
            row = expected[start + k - 1]
            same += int(row.argmax()) == token
            margins.append(float(row.max() - row[token]))
    assert len(margins) == 6 * 40
    assert same / len(margins) > 0.85
    assert max(margins) < LARGEST_DIFFERENCE


def test_no_session_waits_for_another(scenes: dict[str, Any]) -> None:
    order = scenes["sessions"]["order"]
    assert sorted(order) == sorted(f"s{i}#{turn}" for i in range(10) for turn in range(3))
    # Nine sessions were through with all their turns before the slow one had its first.
    assert order.index("s0#0") == 27
    assert [name for name in order if name.startswith("s0")] == ["s0#0", "s0#1", "s0#2"]


def test_lengths_and_weights(scenes: dict[str, Any]) -> None:
    for name, turns in scenes["sessions"]["turns"].items():
        for turn in turns:
            assert len(turn["token_ids"]) == len(turn["logprobs"]) == (200 if name == "s0" else 8)
            assert turn["stop_reason"] == "length"
            assert turn["weights"] == scenes["sha256"][:16]


def test_a_stop_token_ends_a_completion_and_belongs_to_it(scenes: dict[str, Any]) -> None:
    reasons = set()
    for completion in scenes["stops"]:
        *before, last = completion["token_ids"]
        reasons.add(completion["stop_reason"])
        assert all(token >= 200 for token in before)
        assert (last < 200) == (completion["stop_reason"] == "stop")
    assert "stop" in reasons


def test_a_seed_decides_the_sample(scenes: dict[str, Any]) -> None:
    first, again, other = (completion["token_ids"] for completion in scenes["seeds"])
    assert first == again
    assert first != other


def test_prompts_that_fill_several_steps_keep_their_seeds(scenes: dict[str, Any]) -> None:
    assert [len(completion["token_ids"]) for completion in scenes["long"]] == [4] * 4


def test_what_an_ended_session_asked_is_aborted(scenes: dict[str, Any]) -> None:
    assert scenes["aborted"] == {"finished": ["b#0"], "idle": True}


def test_what_cannot_be_served_is_the_callers_mistake(scenes: dict[str, Any]) -> None:
    empty, none, long = scenes["refused"]
    assert "empty prompt" in empty
    assert "max_tokens < 1" in none
    assert long == "request r: 4093 + 4 tokens are more than max_model_len 4096"


def test_episodes_have_the_same_books_as_with_any_engine(scenes: dict[str, Any], reference: Any) -> None:
    assert len(scenes["episodes"]) == 5
    found = []
    for record in scenes["episodes"]:
        assert record["error"] is None
        assert len(record["ids"]) == len(record["mask"]) == len(record["logprobs"])
        sampled = {i for turn in record["turns"] for i in range(turn["start"], turn["start"] + turn["n_tokens"])}
        assert {i for i, flag in enumerate(record["mask"]) if flag} == sampled
        assert all(record["logprobs"][i] == 0.0 for i in range(len(record["ids"])) if i not in sampled)
        expected = reference(record["ids"])
        found += [abs(record["logprobs"][i] - float(expected[i - 1, record["ids"][i]])) for i in sampled]
    assert sum(found) / len(found) < MEAN_DIFFERENCE


def test_an_evaluation_runs_from_end_to_end(scenes: dict[str, Any]) -> None:
    summary = scenes["evaluation"]
    assert (summary["n"], summary["mean_turns"]) == (3, 3.0)
    assert summary["identity"]["engine"] == "vllm"
    assert summary["identity"]["model_sha256"] == scenes["sha256"]
    assert summary["identity"]["versions"]["vllm"] == scenes["versions"]["vllm"]


def test_what_vllm_refuses_is_one_line(scenes: dict[str, Any]) -> None:
    length, argument = scenes["unfit"]
    for message in (length, argument):
        assert message.startswith("vLLM cannot load ")
        assert "\n" not in message
    assert "max_model_len (10000000)" in length
    assert "no_such_argument" in argument


def test_nothing_is_reported_to_anybody(scenes: dict[str, Any], home: Path) -> None:
    assert scenes["outward"] == []
    assert scenes["environment"] == {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
    assert [path for path in home.rglob("*") if "usage" in path.name] == []


def test_the_process_keeps_its_cores_and_says_its_versions(scenes: dict[str, Any]) -> None:
    assert scenes["same_cores"]
    assert set(scenes["versions"]) == {"vllm", "torch", "transformers"}


def test_tests_of_a_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """Otherwise each worker would load the model for itself, as with pytest 9.2 and xdist 3.8, without a word."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run in groups")
    assert request.node.nodeid.endswith("@vllm")


@pytest.mark.parametrize(
    ("config", "linear"),
    [
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, True),
        ({"layer_types": ["linear_attention"]}, True),
        ({"layer_types": ["full_attention"]}, False),
        ({"model_type": "llama", "layer_types": None}, False),
        (None, False),
    ],
)
def test_linear_attention_is_read_off_the_config(tmp_path: Path, config: Any, linear: bool) -> None:
    from shared.engines import vllm

    (tmp_path / "config.json").write_text("{" if config is None else json.dumps(config))
    assert vllm.has_linear_attention(tmp_path) is linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "vllm", "--engine-option", "x"], "is not NAME=VALUE"),
        (["--engine", "vllm", "--engine-option", "a=1", "--engine-option", "a=2"], "is not NAME=VALUE with a new name"),
        (["--engine", "vllm", "--engine-option", "a=["], "the value is not YAML"),
        (["--engine", "hf", "--engine-option", "a=1"], "belongs to --engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "belongs to --engine hf"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        prepare_engine(parse_arguments([*options, "--questions", "q.json", "--databases", "d"]))


def test_engine_options_are_read_as_yaml() -> None:
    assert parse_options(["a=1", "b=false", "c=0.5", "d=x=y", "e={f: [1]}"]) == {
        "a": 1,
        "b": False,
        "c": 0.5,
        "d": "x=y",
        "e": {"f": [1]},
    }


def test_without_vllm_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.engines import vllm

    monkeypatch.setattr(vllm, "prepare_environment", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SetupError, match=r"needs vllm .*pip install 'execplan\[vllm\]'"):
        vllm.import_vllm()
