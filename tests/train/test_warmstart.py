"""The oracle's traces are the episodes that rollouts would have, with the faults that were asked for; fitting fits."""

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.chat import TokenizerCodec
from shared.data.toy import SUFFIXES, ToyQuestion, toy_questions, write_toy
from shared.engines.scripted import CannedEngine
from shared.episode import EpisodeConfig
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.results import official_equal
from shared.sql.sandbox import Sandbox
from shared.tools.protocol import Call, parse_turn
from train.config import ModelConfig
from train.model import load_model
from train.tiny import write_base
from train.tiny_tokenizer import build_tokenizer
from train.traces import Trace, TraceMix, oracle_traces, oracle_turns, play
from train.warmstart import WarmStartConfig, batches, imitation_loss, main, warm_start

QUESTIONS = toy_questions("train", 20, 240, 0)
CODEC = TokenizerCodec(build_tokenizer())
ONLY = {"careful": 0.0, "hasty": 0.0, "blind": 0.0, "bold": 0.0, "wrong": 0.0}


def calls_of(turns: list[str]) -> list[Call]:
    parsed = [parse_turn(text) for text in turns]
    assert all(turn.clean and len(turn.calls) == 1 for turn in parsed)
    calls = [turn.calls[0] for turn in parsed]
    assert all(isinstance(call, Call) for call in calls)
    return [call for call in calls if isinstance(call, Call)]


def turns_of(question: ToyQuestion, **shares: float) -> list[Call]:
    return calls_of(oracle_turns(question, random.Random(0), TraceMix(**{**ONLY, **shares})))


def test_each_way_makes_its_calls() -> None:
    for question in QUESTIONS:
        suffixes = question.database.table_suffix, question.database.column_suffix
        names = [call.tool for call in turns_of(question, careful=1.0)]
        assert names == ["list_tables", "describe_table", "submit_sql"]
        careful = turns_of(question, careful=1.0)
        assert careful[1].args == {"table_name": question.table.name + suffixes[0]}
        assert careful[2].args == {"sql": question.gold_sql}
        assert [call.tool for call in turns_of(question, hasty=1.0)] == ["list_tables", "submit_sql"]
        assert [call.args for call in turns_of(question, blind=1.0)] == [{"sql": question.sql("", "")}]
        bold = turns_of(question, bold=0.999, careful=0.001)
        assert [call.tool for call in bold] == ["run_query", "list_tables", "describe_table", "submit_sql"]
        checked = turns_of(question, careful=1.0, check=1.0)
        assert [call.tool for call in checked][-2:] == ["run_query", "submit_sql"]
        assert checked[-1].args == checked[-2].args == {"sql": question.gold_sql}


def test_shares_are_kept() -> None:
    questions = toy_questions("train", 50, 3000, 1)
    mix = TraceMix(careful=0.3, hasty=0.3, blind=0.25, bold=0.15, wrong=0.2)
    first, wrong = Counter[str](), 0
    for i, question in enumerate(questions):
        calls = calls_of(oracle_turns(question, random.Random(i), mix))
        first[calls[0].tool] += 1
        sql = calls[-1].args["sql"]
        bare = re.sub("|".join(SUFFIXES), "", sql)
        wrong += bare != question.sql("", "")
    n = len(questions)
    for tool, share in (("list_tables", 0.6), ("submit_sql", 0.25), ("run_query", 0.15)):
        assert abs(first[tool] / n - share) < 4 * math.sqrt(share * (1 - share) / n)
    assert abs(wrong / n - 0.2) < 4 * math.sqrt(0.2 * 0.8 / n)


@pytest.mark.parametrize("shares", [{"careful": 0.0, "hasty": 0.0, "blind": 0.0}, {"careful": 0.0, "hasty": 0.0}])
def test_a_mix_without_a_way_is_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no way to go"):
        TraceMix(**shares)


def test_a_trace_is_what_a_rollout_would_be(tmp_path: Path) -> None:
    """Same ids, same mask as an episode of the runner in which an engine says the same texts."""
    questions = QUESTIONS[:24]
    examples = write_toy(questions, tmp_path)
    mix = TraceMix(bold=0.4, check=0.5)
    with Sandbox(1) as sandbox:
        traces = list(oracle_traces(questions, examples, CODEC, sandbox, mix, seed=9))
        for question, example, trace in zip(questions, examples, traces, strict=True):
            turns = oracle_turns(question, random.Random(f"9/{question.question_id}"), mix)
            engine = CannedEngine(CODEC, turns)
            [(_, record)] = run_episodes([Task(example)], engine, CODEC, sandbox, EpisodeConfig(), concurrency=1)
            assert record.ended == "submitted"
            assert (list(trace.ids), list(trace.mask)) == (record.ids, record.mask)
        again = list(oracle_traces(questions, examples, CODEC, sandbox, mix, seed=9))
    assert again == traces
    assert max(len(trace.ids) for trace in traces) < 250


def test_careful_traces_are_right_and_others_are_not(tmp_path: Path) -> None:
    questions = [question for question in QUESTIONS[:60] if question.kind != "count"]
    examples = write_toy(questions, tmp_path)
    with Sandbox(1) as sandbox:
        for question, example in zip(questions, examples, strict=True):
            gold = sandbox.query(example.database, question.gold_sql)
            for way, right in (("careful", True), ("hasty", False), ("blind", False)):
                sql = turns_of(question, **{way: 1.0})[-1].args["sql"]
                result = sandbox.query(example.database, sql)
                guessed = way == "hasty" and sql == question.gold_sql  # one guess of a suffix in 16 is right
                assert (result.outcome == "ok" and official_equal(result.rows, gold.rows)) == (right or guessed)


def test_turns_beyond_the_end_are_no_part_of_a_trace(tmp_path: Path) -> None:
    [question, *_] = QUESTIONS
    [example] = write_toy([question], tmp_path)
    turns = oracle_turns(question, random.Random(0), TraceMix())
    with Sandbox(1) as sandbox:
        one = play(example, turns, CODEC, sandbox, EpisodeConfig())
        more = play(example, [*turns, turns[0]], CODEC, sandbox, EpisodeConfig())
    assert one == more


def make_traces(lengths: list[int]) -> list[Trace]:
    return [Trace(tuple(range(10, 10 + n)), tuple(int(i % 3 == 2) for i in range(n))) for n in lengths]


def test_batches_pass_over_all_traces_and_keep_lengths_together() -> None:
    lengths = [random.Random(i).randint(20, 200) for i in range(256)]
    traces = make_traces(lengths)
    source = batches(traces, 16, random.Random(0))
    passed = [next(source) for _ in range(16)]
    assert Counter(len(t.ids) for batch in passed for t in batch) == Counter(lengths)
    assert max(max(len(t.ids) for t in batch) - min(len(t.ids) for t in batch) for batch in passed) < 60
    assert [len(t.ids) for t in next(source)] != [len(t.ids) for t in passed[0]]
    with pytest.raises(ValueError, match="do not fill a batch of 16"):
        next(batches(traces[:15], 16, random.Random(0)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder in the demo's layout."""
    folder = tmp_path_factory.mktemp("warm") / "base"
    write_base(folder)
    return folder


def test_loss_is_the_mean_over_counted_tokens_whatever_the_padding(base: Path) -> None:
    model = load_model(ModelConfig(path=str(base)))
    traces = make_traces([30, 71, 50])
    total, count = 0.0, 0
    for trace in traces:
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([trace.ids])).logits[0].log_softmax(-1)
        for i in range(1, len(trace.ids)):
            if trace.mask[i]:
                total -= float(logprobs[i - 1, trace.ids[i]])
                count += 1
    with torch.no_grad():
        assert float(imitation_loss(model, traces)) == pytest.approx(total / count, rel=1e-5)


def test_losses_are_those_of_trl(base: Path, tmp_path: Path) -> None:
    """TRL's SFTTrainer as the oracle: the same rows in the same order, plain gradient descent, four steps."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    groups = [make_traces([30 + 7 * i + 3 * j for j in range(4)]) for i in range(4)]
    ours = load_model(ModelConfig(path=str(base)))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    losses = []
    for group in groups:
        optimizer.zero_grad()
        loss = imitation_loss(ours, group)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    theirs = load_model(ModelConfig(path=str(base)))
    rows = [
        {"input_ids": list(t.ids), "labels": [i if m else -100 for i, m in zip(t.ids, t.mask, strict=True)]}
        for group in groups
        for t in group
    ]
    arguments = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        max_steps=4,
        max_grad_norm=1e9,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = InOrder(
        model=theirs,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        optimizers=(
            sgd := torch.optim.SGD(theirs.parameters(), lr=0.05),
            torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0),
        ),
    )
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(losses, rel=1e-4)
    assert losses[3] < losses[0]


def config_for(base: Path, output: Path, **changes: Any) -> WarmStartConfig:
    settings = {
        "output": output,
        "model": {"path": str(base)},
        "databases": 10,
        "questions": 48,
        "steps": 30,
        "batch": 8,
        "log_every": 10,
        "threads": 1,
        "optimizer": {"name": "muon", "lr": 3e-3, "muon_lr": 0.02, "betas": [0.9, 0.95]},
    }
    return WarmStartConfig.model_validate_json(json.dumps({**settings, **changes}, default=str))


def test_warm_start_learns_writes_a_loadable_folder_and_repeats(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = []
    for name in ("a", "b"):
        folder = warm_start(config_for(base, tmp_path / name))
        model = load_model(ModelConfig(path=str(folder)))
        weights.append({key: value.clone() for key, value in model.state_dict().items()})
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warm start  step")]
    assert len(lines) == 6
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines[:3]]
    assert losses[0] > 2.5
    assert losses[2] < 1.5
    assert "tok/s" in lines[0]
    assert "ETA" in lines[0]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-data", "b", "b-data"]
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"] == list(CODEC.stop_ids)


def test_a_loss_that_is_not_finite_stops_and_writes_nothing(base: Path, tmp_path: Path) -> None:
    optimizer = {"name": "adamw", "lr": 1e30, "clip_norm": 1e30}
    with pytest.raises(SetupError, match=r"the loss is nan at step \d+"):
        warm_start(config_for(base, tmp_path / "out", optimizer=optimizer))
    assert not (tmp_path / "out").exists()


def test_bad_input_is_refused_before_anything_is_written(base: Path, tmp_path: Path) -> None:
    good = config_for(base, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    for changes, message in (
        ({"output": tmp_path / "used"}, "exists already"),
        ({"model": ModelConfig(path=str(tmp_path / "none"))}, "neither a folder nor a hub id"),
        ({"questions": 4, "databases": 2}, "do not fill a batch"),
        ({"questions": 8, "databases": 9}, "at least one question a database"),
    ):
        with pytest.raises(SetupError, match=message):
            warm_start(good.model_copy(update=changes))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_command_line_takes_overrides(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "demo_warmstart.yaml"
    sizes = ["questions=16", "databases=4", "steps=2", "batch=4"]
    main(["--config", str(shipped), f"model.path={base}", f"output={tmp_path / 'out'}", *sizes])
    assert str(tmp_path / "out") in capsys.readouterr().out
    with pytest.raises(SetupError, match="unknown key 'epochs'"):
        main(["--config", str(shipped), "epochs=3"])
