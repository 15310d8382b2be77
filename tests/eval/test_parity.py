"""An exported folder against its checkpoint: an exact one passes, and what is wrong with another is named."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval import parity
from eval.compare import compare
from eval.pairing import load_run
from eval.parity_figures import _gap, judge, render
from eval.parity_sides import SIDES, read_tokens
from eval.records import to_line
from shared.errors import SetupError
from tests.eval.parity_cases import arguments, perturb, result_of, write_pair

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def exact(pair: tuple[Path, Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check of an exact export, which passed."""
    out = tmp_path_factory.mktemp("exact") / "out"
    assert parity.main(arguments(*pair, data, out)) == 0
    return out


def test_an_exact_export_passes_in_both_modes(exact: Path) -> None:
    result = result_of(exact)
    assert result["verdict"] == "no difference beyond noise"
    assert (result["weights"]["compared"], result["weights"]["different"]) == (21, [])
    assert [figures["mode"] for figures in result["modes"]] == ["withheld", "full"]
    for figures in result["modes"]:
        for side in ("export", "again"):
            assert (figures[side]["n"], figures[side]["same_tokens"], figures[side]["p_holm"]) == (3, 1.0, 1.0)
            assert figures[side]["logprobs"]["tokens"] > 50
            assert figures[side]["logprobs"]["max"] == 0
        # The sampler's own figures come through a cache, token by token: near, and not the same computation.
        assert 0 < figures["sampler_against_scorer"]["mean"] < 0.05
    assert (exact / "parity.txt").read_text() == render(result) + "\n"


def test_each_side_is_a_run_like_any_other(exact: Path) -> None:
    synced, export = (load_run(exact / f"{side}-full") for side in ("synced", "export"))
    assert synced.identity["model_sha256"] != export.identity["model_sha256"]
    assert compare(synced, export)["verdict_name"] == "identical"
    for side in SIDES:
        tokens = read_tokens(exact / f"{side}-full.tokens.jsonl")
        assert tokens.keys() == synced.episodes.keys()
        for key, record in load_run(exact / f"{side}-full").episodes.items():
            assert (len(tokens[key]["ids"]), sum(tokens[key]["mask"])) == (
                record["total_tokens"],
                record["sampled_tokens"],
            )


def test_another_configuration_is_found_and_named(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    changed = perturb(pair[1], tmp_path / "changed", LAYER, lambda tensor: tensor)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert parity.main(arguments(pair[0], changed, data, tmp_path / "out", "--mode", "full")) == 1
    assert result_of(tmp_path / "out")["reasons"][0] == "the configurations differ in rms_norm_eps"


def test_lost_or_impossible_logprobs_are_never_no_difference() -> None:
    one, two = ("q", 0), ("r", 0)
    assert _gap({one: [-1.0, -2.0], two: [-3.0]}, {one: [-1.0, -2.5], two: [-3.0]}) == {
        "tokens": 3,
        "missing": 0,
        "mean": pytest.approx(0.5 / 3),
        "max": 0.5,
    }
    assert _gap({one: [-1.0, -2.0], two: [-3.0]}, {one: [-1.0]})["missing"] == 2
    assert _gap({one: [-1.0, float("nan")]}, {one: [-1.0, -2.0]}) == {
        "tokens": 1,
        "missing": 1,
        "mean": 0.0,
        "max": 0.0,
    }
    nothing = {"tokens": 0, "missing": 4, "mean": None, "max": None}
    lost = figures(0.5, 0.0, 0.0)
    lost["export"]["logprobs"] = nothing
    assert judge(WEIGHTS, [lost])["reasons"] == [
        "4 log-probs in mode withheld are missing on one side, or are no numbers",
        "no log-probs in mode withheld could be compared",
    ]


def test_one_changed_layer_is_found_and_named(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = perturb(pair[1], tmp_path / "broken", LAYER, lambda tensor: -tensor)
    out = tmp_path / "out"
    assert parity.main(arguments(pair[0], broken, data, out, "--base", str(pair[1]), "--mode", "full")) == 1
    result = result_of(out)
    assert result["weights"]["different"] == [LAYER]
    weights, logprobs = result["reasons"]
    assert weights == f"1 language tensors are not the checkpoint's, {LAYER} for one"
    assert logprobs.startswith("log-probs in mode full are ")
    (figures,) = result["modes"]
    assert figures["export"]["logprobs"]["mean"] > 0.01 > figures["again"]["logprobs"]["mean"] == 0
    assert figures["export"]["same_tokens"] < 1
    said = capsys.readouterr().out
    assert f"Verdict: differs: {weights}" in said
    assert f"  {LAYER}\n" in said


def test_a_stopped_check_goes_on_and_repeats_nothing(
    exact: Path, pair: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its second side: an episode is missing, another was only half written."""
    out = tmp_path / "out"
    out.mkdir()
    before = {path.relative_to(exact): path.read_bytes() for path in exact.rglob("*") if path.is_file()}
    for name, content in before.items():
        if not str(name).startswith(("export-", "parity.")):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)
    (out / "again-full.logprobs.json").unlink()
    (out / "again-full" / "summary.json").unlink()
    episodes = out / "again-full" / "episodes.jsonl"
    episodes.write_bytes(b"".join(episodes.read_bytes().splitlines(True)[:2]))
    with open(out / "again-full.tokens.jsonl", "ab") as file:
        file.write(b'{"question_id": "0", "sam')
    kept = {path: path.stat().st_mtime_ns for path in out.glob("synced-*/*")}
    assert parity.main(arguments(*pair, data, out)) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("synced-*/*")} == kept
    for name in ("again-full/episodes.jsonl", "export-withheld/episodes.jsonl", "again-full.logprobs.json"):
        assert (out / name).read_bytes() == before[Path(name)]
    told, first = result_of(out), result_of(exact)
    assert {**told, "runs": 0} == {**first, "runs": 0}
    monkeypatch.setattr(parity, "run_side", lambda plan, side: pytest.fail("a model was loaded"))
    with pytest.raises(SetupError, match=r"finished run that differs in seed: give another --out"):
        parity.main(arguments(*pair, data, out, "--seed", "5"))


def figures(p: float, gap: float, noise: float, flips: tuple[float, float] = (0.2, 0.1)) -> dict[str, Any]:
    """A mode's figures as `mode_figures` has them."""

    def side(p: float, flip_rate: float, gap: float) -> dict[str, Any]:
        return {
            "n": 300,
            "p": p,
            "delta": -0.05,
            "score_a": 0.5,
            "score_b": 0.45,
            "ci": [-0.09, -0.01],
            "flip_rate": flip_rate,
            "same_tokens": 0.4,
            "minimum_detectable_effect": 0.07,
            "logprobs": {"tokens": 9, "missing": 0, "mean": gap, "max": gap},
        }

    return {"mode": "withheld", "export": side(p, flips[0], gap), "again": side(1.0, flips[1], noise)}


WEIGHTS = {"compared": 320, "different": [], "missing": [], "settings": []}


def test_the_rule() -> None:
    fine, bad = figures(0.5, 0.002, 0.001), figures(0.02, 0.002, 0.001)
    assert not judge(WEIGHTS, [figures(0.5, 0.002, 0.001)])["differs"]
    alone = judge(WEIGHTS, [bad])
    assert alone["verdict"] == (
        "differs: official in mode withheld is -5.0 points from the synced weights' (Holm p = 0.0200; more questions "
        "flip than between two runs of those weights)"
    )
    # One of three tests: p = 0.02 is 0.06 in its family.
    family = judge(WEIGHTS, [figures(0.02, 0.002, 0.001), fine, figures(0.6, 0.002, 0.001)])
    assert not family["differs"]
    assert family["modes"][0]["export"]["p_holm"] == pytest.approx(0.06)
    within = judge(WEIGHTS, [figures(0.02, 0.002, 0.001, flips=(0.2, 0.2))])
    assert "no more questions flip" in within["verdict"]
    # Log-probs go by the noise floor: 3 x 0.001 + 0.0001.
    assert judge(WEIGHTS, [figures(0.5, 0.0032, 0.001)])["reasons"] == [
        "log-probs in mode withheld are 0.0032 apart on average (noise floor 0.001)"
    ]
    assert not judge(WEIGHTS, [figures(0.5, 0.0031 - 1e-9, 0.001)])["differs"]
    lost = judge(WEIGHTS | {"missing": ["model.norm.weight"]}, [fine])
    assert lost["reasons"] == ["1 language tensors are in one of the folders only, model.norm.weight for one"]
    assert "below: withheld 7.0 points." in render(lost)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--engine", "vllm"], "--engine vllm needs --base"),
        (["--model", "x"], "--model does not fit here"),
        (["--vote=3"], "--vote=3 does not fit here"),
        (["--limit", "0"], "limit"),
        (["--no-such-flag"], "no-such-flag"),
        (["--base", "./nothing"], "does not exist"),
        (["--export", "./nothing"], "--export nothing is no folder"),
        (["--questions", "./nothing.json"], r"nothing\.json"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, more: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "run_side", lambda plan, side: pytest.fail("a model was loaded"))
    with pytest.raises(SetupError, match=message):
        parity.main(arguments(*pair, data, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = perturb(pair[0], tmp_path / "cut", LAYER, lambda tensor: tensor[:, :8].contiguous())
    with pytest.raises(SetupError, match=r"down_proj\.weight of .* has shape \(32, 8\), in the model \(32, 64\)"):
        parity.main(arguments(cut, pair[1], data, tmp_path / "out", "--mode", "full"))

    monkeypatch.setattr(parity, "run_side", lambda plan, side: pytest.fail("a model was loaded"))
    from_base = ("--base", str(pair[1]))
    with pytest.raises(
        SetupError, match=r"down_proj\.weight has shape \(32, 8\) in .* and \(32, 64\) in .* give the base"
    ):
        parity.main(arguments(cut, pair[1], data, tmp_path / "out", *from_base))
    lacking = perturb(pair[1], tmp_path / "lacking", LAYER, lambda tensor: None)
    with pytest.raises(SetupError, match=r"are different models \(model\.layers\..*down_proj\.weight is in .* only"):
        parity.main(arguments(pair[0], pair[1], data, tmp_path / "out", "--base", str(lacking)))
    nan = perturb(pair[0], tmp_path / "nan", LAYER, lambda tensor: tensor / 0)
    with pytest.raises(SetupError, match="not finite"):
        parity.main(arguments(nan, pair[1], data, tmp_path / "out2", "--mode", "full"))
    (tmp_path / "nan" / "adapter_config.json").write_text("{}")
    with pytest.raises(SetupError, match="holds an adapter"):
        parity.main(arguments(tmp_path / "nan", pair[1], data, tmp_path / "out3"))


def test_another_template_is_refused(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    other = perturb(pair[1], tmp_path / "other", LAYER, lambda tensor: tensor)
    path = other / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>system", "<|im_start|>developer"))
    with pytest.raises(SetupError, match="different chat templates"):
        parity.main(arguments(*pair, data, tmp_path / "out", "--base", str(other)))


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_side_in_its_own_process_says_itself_what_was_wrong(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(parity.subprocess, "run", run)
    assert parity._in_a_process(["--out", "x"], "again") == code
    assert commands[0][1:] == ["-m", "eval.parity", "--out", "x", "--side", "again"]


def test_a_side_that_was_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -9))
    with pytest.raises(SetupError, match=r"side export ended with exit code -9: .* run the same command to go on"):
        parity._in_a_process([], "export")


def test_a_head_counts_where_it_is_not_the_embedding(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from shared.engines.checkpoint_weights import compare_language_weights

    embedding, other = torch.eye(4), torch.ones(4, 4)

    def folder(name: str, prefix: str = "model.", **more: torch.Tensor) -> Path:
        (tmp_path / name).mkdir()
        vision = {"model.visual.x": torch.rand(2), "mtp.fc.weight": torch.rand(2)}
        heads = {"lm_head.weight": more["head"].clone()} if more else {}
        tensors = {f"{prefix}embed_tokens.weight": embedding.clone(), **vision, **heads}
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    tied = folder("tied", "model.language_model.")
    assert compare_language_weights(tied, folder("written", head=embedding)).equal
    assert compare_language_weights(tied, folder("own", head=other)).missing == ("lm_head.weight",)
    assert compare_language_weights(tmp_path / "written", tmp_path / "own").different == ("lm_head.weight",)


def test_tokens_of_an_episode_that_was_begun_twice_are_the_last(tmp_path: Path) -> None:
    lines = [{"question_id": "q", "sample": 0, "ids": [i]} for i in (1, 2)]
    (tmp_path / "t").write_text(to_line(lines[0]) + json.dumps(lines[1])[:20] + "\n" + to_line(lines[1]))
    assert read_tokens(tmp_path / "t") == {("q", 0): lines[1]}
