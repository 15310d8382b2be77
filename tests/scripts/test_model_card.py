"""The model card: every figure held to the record that it comes from, and what has no place on it refused."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from eval.card import results_markdown
from eval.models import model_sha256
from eval.pairing import load_run
from shared.errors import SetupError
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS, PROMPT_SHA256
from tests.eval.runs import record, write_run
from tests.scripts.export_cases import export, snapshot
from tests.train.conftest import tiny_model, tiny_tokenizer
from tests.train.scripted_run import finish, metrics
from train.export.record import read_base, read_training
from train.selection import read_validation

STEPS, PLANNED = 4, 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a hub's cache holds one, with a licence."""
    folder = tmp_path_factory.mktemp("hub") / "models--Someone--Tiny-1.0" / "snapshots" / ("ab12" * 10)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("Do as you like.")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: https://example.org/l\n---\n# Tiny\n")
    return folder


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped before its planned end, validated on the way."""
    folder = tmp_path_factory.mktemp("run")
    settings = [f"steps={STEPS}", f"planned_steps={PLANNED}", "checkpoint.every=1", "checkpoint.keep=9"]
    finish(folder, base, *settings, "validation.every=2", "validation.benchmark=toy", "rollout.explore_share=0.5")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(base: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports of the run's checkpoints, each made once."""
    made: dict[str, Path] = {}

    def of(checkpoint: str) -> Path:
        if checkpoint not in made:
            made[checkpoint] = tmp_path_factory.mktemp("exports") / "tiny-sql"
            assert export(base, run / checkpoint, made[checkpoint]) == 0
        return made[checkpoint]

    return of


@pytest.fixture
def last(exported: Callable[[str], Path]) -> Path:
    return exported(f"checkpoint-step-{STEPS}")


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    part = text.split(f"# {title}\n")[1]
    lines = [line for line in part.split("\n#")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def facts(text: str) -> dict[str, str]:
    return dict(rows(text, "Training"))  # type: ignore[arg-type]


# ---- the first card


def test_the_head_is_what_a_hub_reads(last: Path) -> None:
    head = yaml.safe_load(card(last).split("---\n")[1])
    assert head == {
        "base_model": "Someone/Tiny-1.0",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "license_link": "https://example.org/l",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["text-to-sql", "sqlite", "agent", "grpo"],
    }


def test_serving_and_prompting_are_exact(last: Path, base: Path) -> None:
    text = card(last)
    assert "vllm serve tiny-sql --max-model-len 8000\n" in text
    ids = json.loads((last / "generation_config.json").read_text())["eos_token_id"]
    assert f"stops on `<|im_end|>` ({ids[0]}) and `<|endoftext|>` ({ids[1]})" in text
    assert ids == [tiny_tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    prompt = re.search(r"^````\n(.*?)\n````$", text, re.MULTILINE | re.DOTALL)
    assert prompt is not None
    assert prompt[1] == EXEC_PLAN_TOOL_INSTRUCTIONS
    assert hashlib.sha256(prompt[1].encode()).hexdigest() == PROMPT_SHA256
    assert f"`{PROMPT_SHA256}`" in text
    # The run's budgets are not the evaluation's, so agent.py is told.
    assert 'agent.py --max-tokens 8000 --max-turns 2 --max-new-tokens 300 --db shop.sqlite "How' in text
    assert "Not evaluated yet." in text
    assert "The base's card says: apache-2.0 (https://example.org/l)." in text
    assert "The base's LICENSE is in this folder." in text
    assert "[Someone/Tiny-1.0](https://huggingface.co/Someone/Tiny-1.0) (commit ab12ab12ab12)" in text


def test_training_figures_are_those_of_the_run(last: Path, run: Path) -> None:
    import torch

    state = torch.load(run / f"checkpoint-step-{STEPS}" / "train_state.pt", weights_only=True)
    lines, found = metrics(run.parent), facts(card(last))
    assert found["question pool"] == f"sha256 `{state['pool_hash']}`"
    assert found["fingerprint of the weights"] == f"`{state['weights']}`"
    assert found["steps"] == f"{STEPS} of {PLANNED} planned"
    assert found["data-parallel ranks"] == "1"
    assert found["batch"] == "6 questions x 4 candidates = 24 episodes a step"
    assert found["episode budget"] == "8,000 tokens, 2 tool turns, 300 new tokens a turn"
    assert found["schema"] == "withheld in 50% of the episodes, shown in the others"
    assert found["optimizer"] == "adamw, lr 0.001, cosine, 5% warm-up, gradient norm at most 1"
    assert found["loss"].startswith("sum over sampled tokens / 1024")
    assert found["groups left out"] == "all rewards equal"
    assert found["ratio"] == "sequence-level against the sampler's log-probs, clip 0.2 / 0.28"
    assert found["KL to the start"] == "k3, target 0.005 (adaptive coefficient, from 0.02)"
    sampled = sum(line["sampled_tokens"] * line["episodes"] for line in lines)
    assert found["episodes"] == f"{24 * STEPS}, {round(sampled):,} tokens sampled in them"
    first, second = (sum(line["reward"] for line in part) / 2 for part in (lines[:2], lines[-2:]))
    assert found["mean reward, first and last 2 steps"] == f"{first:.3f}, {second:.3f}"


def test_it_says_which_checkpoint_it_is_and_what_selected_it(
    last: Path, exported: Callable[[str], Path], run: Path
) -> None:
    best = json.loads((run / "best.json").read_text())
    scores = {line["step"]: line["score"] for line in read_validation(run)}
    assert best["step"] in (2, 4)
    where = "(official accuracy on the shop (5 of 60 questions), schema withheld, asked 2 times)"
    texts = {step: " ".join(card(exported(f"checkpoint-step-{step}")).split()) for step in (2, 3, 4)}
    for step, text in texts.items():
        assert f"The run did not finish: {PLANNED} steps were planned, it reached step {STEPS}." in text
        assert where in text
        assert f"This is the state after step {step}, " in text
        assert ("the last one that the run reached" in text) == (step == STEPS)
        assert ("It is the run's `best`" in text) == (step == best["step"])
        assert f"scored highest ({best['score']:.3f})" in text
        assert "too high an estimate" in text
    other = 6 - best["step"]
    assert f"this one scored {scores[other]:.3f} there" in texts[other]
    assert "it was not asked at this step" in texts[3]
    linked = " ".join(card(exported("best")).split())
    assert f"This is the state after step {best['step']}, " in linked


def test_counts_are_those_of_the_export(last: Path) -> None:
    report = json.loads((last / "export_report.json").read_text())
    weights = {"model.safetensors", "export_report.json"}
    assert report["rewritable"] == ["README.md"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in snapshot(last).items()} == report["files"] | {
        name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in (*weights, *report["rewritable"])
    }
    assert "agent.py" in report["files"]
    found = {row[0]: row[1:] for row in rows(card(last), "Provenance")}
    assert found["all"] == [f"{report[key]:,}" for key in ("tensors", "parameters", "changed")]
    assert set(found) == {"trained", "all"}
    assert report["changed"] > 0


def test_a_finished_run_without_validation_says_so(base: Path, tmp_path: Path) -> None:
    finish(tmp_path, base, "steps=1", "checkpoint.every=1")
    assert export(base, tmp_path / "run", tmp_path / "out", "--no-verify") == 0
    text = card(tmp_path / "out")
    assert "did not finish" not in text
    assert "no score chose this checkpoint" in text
    assert "Not read back and compared" in text
    assert rows(text, "Provenance")[-1][-1] == "not compared"


def test_a_checkpoint_from_elsewhere_has_no_training_record(base: Path, last: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("model.safetensors", "config.json"):
        (elsewhere / name).write_bytes((last / name).read_bytes())
    assert read_training(elsewhere) is None
    assert export(base, elsewhere, tmp_path / "out") == 0
    text = card(tmp_path / "out")
    assert "How it was trained is not on record" in text
    assert "grpo" not in yaml.safe_load(text.split("---\n")[1])["tags"]
    assert "--max-model-len 24576" in text


def test_a_record_that_cannot_be_read_does_not_stop_the_export(
    base: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoint-step-1"
    folder.mkdir(parents=True)
    for path in (run / "checkpoint-step-1").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    size = (folder / "train_state.pt").stat().st_size
    (folder / "train_state.pt").write_bytes(b"x" * size)
    assert export(base, folder, tmp_path / "out") == 0
    assert "the model card has no training record" in capsys.readouterr().out.replace("\n", " ")
    assert "not on record" in card(tmp_path / "out")


def test_a_base_that_is_a_folder_has_no_hub_id(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: [broken\n---\n")
    found = read_base(tmp_path)
    assert (found.name, found.hub_id, found.license, found.license_files) == (tmp_path.name, None, None, ())


# ---- with evaluations


def identity(sha256: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "exports/tiny-sql",
        "model_sha256": sha256,
        "engine": "hf",
        "benchmark": "bird",
        "subset": "all",
        "mode": "withheld",
        "seed": 3,
        "sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        "budgets": {"max_turns": 6, "max_new_tokens": 2048, "max_tokens": 24576},
        "prompt_sha256": PROMPT_SHA256,
        "versions": {"execplan": "0.1.0"},
        **changes,
    }


def evaluation(folder: Path, verdicts: str, sha256: str, **changes: Any) -> Path:
    """A finished run whose i-th question scored what `verdicts` says: 1, 0, or x for one without a verdict."""
    records = [
        record(
            f"q{i}",
            None if verdict == "x" else float(verdict),
            difficulty="simple" if i % 2 else "challenging",
            strict=float(verdict == "1" and i > 2),
            truncated=i == 0,
            origin="fallback" if i == 1 else "submitted",
        )
        for i, verdict in enumerate(verdicts)
    ]
    return write_run(folder, records, **identity(sha256, **changes))


@pytest.fixture(scope="module")
def model_card(run: Path) -> ModuleType:
    import importlib.util

    from tests.scripts.export_cases import ROOT

    spec = importlib.util.spec_from_file_location("model_card", ROOT / "scripts" / "model_card.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OURS, THEIRS = "1111111110110000000x", "1000000010111100000x"  # 11 and 6 of 19; only ours: 7, only theirs: 2


def test_results_are_those_of_the_runs(last: Path, model_card: ModuleType, tmp_path: Path) -> None:
    sha256, before = model_sha256(last), snapshot(last)
    ours = evaluation(tmp_path / "ours", OURS, sha256)
    full = evaluation(tmp_path / "full", "1" * 20, sha256, mode="full", model_sha256=f"served:tiny:{sha256}")
    other = evaluation(tmp_path / "other", THEIRS, "9" * 64, model="Someone/Tiny-1.0")
    close = evaluation(tmp_path / "close", "0" * 6 + "1" * 14, "7" * 64, model="runs/close", mode="full", seed=1)
    worse = evaluation(tmp_path / "worse", "0" * 20, "8" * 64, model="/data/models/none", mode="full")
    baselines = [str(other), str(close), str(worse)]
    assert model_card.main(["--export", str(last), "--eval", str(ours), str(full), "--baseline", *baselines]) == 0
    text = card(last)
    # Wilson's interval by its formula: 11 of 19, and 20 of 20.
    assert rows(text, "Scores") == [
        ["bird", "withheld", "19 of 20", "57.9%", "36.3 – 76.9", "42.1%", "23.1 – 63.7", "94.7%", "5.3%", "1.0"],
        ["bird", "full", "20 of 20", "100.0%", "83.9 – 100.0", "85.0%", "64.0 – 94.8", "95.0%", "5.0%", "1.0"],
    ]
    levels = {tuple(row[:3]): row[3:5] for row in rows(text, "By difficulty")}
    assert levels[("bird", "withheld", "challenging")] == ["10", "60.0%"]
    assert levels[("bird", "withheld", "simple")] == ["9", "55.6%"]
    first, second, third = rows(text, "Against other models")
    assert first[:7] == ["Someone/Tiny-1.0", "bird", "withheld", "19", "31.6%", "57.9%", "+26.3"]
    # McNemar by hand: 2 (1 + 9 + 36) / 2**9, 2 / 2**6 and 2 / 2**20; Holm multiplies the smaller two by 2 and 3.
    assert first[8:11] == ["2 / 7", "0.1797", "0.1797"]
    assert first[12:] == ["no difference shown", "nothing"]
    assert second[:7] == ["runs/close", "bird", "full", "20", "70.0%", "100.0%", "+30.0"]
    assert second[8:11] == ["0 / 6", "0.0312", "0.0625"]
    assert second[12:] == ["could not be shown at this n", "seed"]
    assert third[:7] == ["none", "bird", "full", "20", "0.0%", "100.0%", "+100.0"]
    assert third[8:11] == ["0 / 20", "\\< 0.0001", "\\< 0.0001"]
    assert third[12] == "this model is better"
    settings = rows(text, "How it was measured")
    assert settings[0][2:6] == [
        "temperature 0.6, top-p 0.95, top-k 20",
        "3",
        "1",
        "6 tool turns, 2,048 new tokens a turn, 24,576 tokens",
    ]
    assert settings[0][-1] == "d" * 16
    assert "Not evaluated yet" not in text
    # The rest of the export is as it was: it still is what it was verified to be, and what the runs measured.
    after = snapshot(last)
    assert {name for name in after if after[name] != before.get(name)} == {"README.md"}
    assert model_sha256(last) == sha256
    assert model_card.main(["--export", str(last)]) == 0
    assert card(last) == before["README.md"].decode()


def test_what_a_benchmark_does_not_have_is_a_dash(last: Path, tmp_path: Path) -> None:
    """Samples, no strict rule and no levels: n counts questions, and a question scores its mean."""
    records = [record(f"q{i // 2}", float(i == 0), sample=i % 2, difficulty="") for i in range(4)]
    for line in records:
        line["scores"]["strict"] = None
    folder = write_run(tmp_path / "run", records, **identity("a" * 64, benchmark="spider2", subset="guess87"))
    text = results_markdown([load_run(folder)], [], "a" * 64)
    (row,) = rows(text, "Scores")
    assert row[:4] == ["spider2 (guess87)", "withheld", "2 of 2", "25.0%"]
    assert row[5:7] == ["–", "–"]
    assert "By difficulty" not in text
    assert rows(text, "How it was measured")[0][4] == "2"


def test_a_run_folder_that_has_gone_on_can_be_read_again(
    last: Path, run: Path, model_card: ModuleType, base: Path, tmp_path: Path
) -> None:
    before = card(last)
    assert model_card.main(["--export", str(last), "--run", str(run)]) == 0
    assert card(last) == before
    finish(tmp_path, base, f"steps={STEPS}", "checkpoint.every=1", "optimizer.lr=2e-3")
    with pytest.raises(SetupError, match="has other weights than the exported one"):
        model_card.main(["--export", str(last), "--run", str(tmp_path / "run")])
    with pytest.raises(SetupError, match=rf"has no complete checkpoint-step-{STEPS}, which was exported"):
        model_card.main(["--export", str(last), "--run", str(tmp_path)])
    assert card(last) == before


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"sha256": "7" * 64}, "is of another model"),
    ({"sha256": "gold"}, "is of another model"),
    ({"sha256": "served:tiny"}, "nothing on record says which weights"),
    ({"sha256": f"served:tiny:{'7' * 64}"}, "is of another model"),
    ({"prompt_sha256": "0" * 64}, "another system prompt"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_runs_of_another_model_or_prompt_are_refused(
    last: Path, model_card: ModuleType, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    before = snapshot(last)
    theirs = evaluation(tmp_path / "run", "1100", **({"sha256": model_sha256(last)} | changes))
    with pytest.raises(SetupError, match=message):
        model_card.main(["--export", str(last), "--eval", str(theirs)])
    assert snapshot(last) == before


def test_what_does_not_go_together_is_refused(last: Path, model_card: ModuleType, tmp_path: Path) -> None:
    sha256, before = model_sha256(last), snapshot(last)
    ours = evaluation(tmp_path / "ours", "1100", sha256)
    again = evaluation(tmp_path / "again", "1100", sha256, seed=4)
    shown = evaluation(tmp_path / "shown", "1100", "9" * 64, mode="full")
    none = evaluation(tmp_path / "none", "xxxx", sha256)
    (tmp_path / "empty").mkdir()
    cases: Sequence[tuple[list[Path], list[Path], str]] = [
        ([ours], [again], "is of this model itself"),
        ([ours], [shown], "asked other questions than every run of this model, or in another mode"),
        ([], [shown], "give them with --eval"),
        ([tmp_path / "nowhere"], [], "does not exist"),
        ([tmp_path / "empty"], [], "is no finished run"),
        ([none], [], "scored no question"),
    ]
    for evals, baselines, message in cases:
        arguments = ["--export", str(last)]
        arguments += ["--eval", *map(str, evals)] if evals else []
        arguments += ["--baseline", *map(str, baselines)] if baselines else []
        with pytest.raises(SetupError, match=message):
            model_card.main(arguments)
    with pytest.raises(SetupError, match=r"export_report\.json does not exist"):
        model_card.main(["--export", str(tmp_path / "empty")])
    (tmp_path / "empty" / "export_report.json").write_text("{}")
    with pytest.raises(SetupError, match="holds no records for a card"):
        model_card.main(["--export", str(tmp_path / "empty")])
    assert snapshot(last) == before
