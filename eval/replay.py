"""Replay a run without its model: `python -m eval.replay RUN`. Every recorded turn is parsed again, its calls run again
over the same databases, the episode ends again, its answer is scored again, and the summary is made again.

What comes out must be what is on record. Each difference is reported, and makes the exit code 1: a database that
changed, another SQLite, a tool or a rule that works differently now, a query whose result is not determined, a
machine so much slower that something runs out of time.

What a replay cannot know, because it has no tokens: how far a token limit cut a result before the model saw it, and
that a token limit ended the episode. It takes the latter from the record.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from eval.benchmarks import load_benchmark
from eval.config import EvalConfig
from eval.identity import data_sha256, own_versions
from eval.judge import Judge, open_book
from eval.pairing import Run, load_run
from eval.records import RUN, read_json
from eval.summary import summarize
from shared.chat import ByteCodec
from shared.cli import ArgumentParser, run_main
from shared.config import build_config
from shared.data.example import Example
from shared.engines.base import Completion
from shared.episode import Ended, Episode, EpisodeConfig, EpisodeRecord
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from shared.text import plain
from shared.tools.executor import ToolExecutor
from shared.tools.protocol import PROMPT_SHA256

# What a replay has no tokens to know, and where a record says which sampling it was.
_NOT_REPLAYED = {"seed", "sample", "truncated", "sampled_tokens", "total_tokens", "n_prompt_tokens", "weights"}
_NOT_REPLAYED_IN_TURN = {"start", "n_tokens", "stop_reason"}
_ENDED_BY_TOKENS: Ended = "token_limit"
_SHOWN_CHARACTERS = 160
_SHOWN = 40


@dataclass(frozen=True)
class Difference:
    """One place where the replay says something else than the record. `where` is a path into the record."""

    question_id: str
    sample: int
    where: str
    recorded: str
    replayed: str

    @property
    def by_the_clock(self) -> bool:
        """True when one side ran out of time: a slower or a faster machine is enough for that."""
        return "timeout" in (self.recorded, self.replayed) or "timeout:" in self.recorded + self.replayed


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay. `notes` are circumstances that may explain differences."""

    episodes: int
    calls: int
    scored: int
    seconds: float
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


class _TextCodec(ByteCodec):
    """Bytes as ids, without an opened think block: a recorded text already begins with what the template opened."""

    def __init__(self) -> None:
        super().__init__()
        opening, reopening = (text.removesuffix("<think>\n") for text in (self.texts.opening, self.texts.reopening))
        self.texts = replace(self.texts, opening=opening, reopening=reopening)


def replay_episode(
    record: Mapping[str, Any], example: Example, sandbox: Sandbox, config: EpisodeConfig
) -> EpisodeRecord:
    """Play a recorded episode's turns against the environment as it is now; SetupError when the database is at fault.

    It goes on until the environment ends it or the record has no more turns.
    """
    codec = _TextCodec()
    episode = Episode(example, ToolExecutor(example.database, sandbox), codec, config, seed=record["seed"])
    for turn in record["turns"]:
        request = episode.next_request()
        if request is None:
            break
        closed = turn["stop_reason"] == "stop"
        ids = [*codec.encode_text(turn["text"]), *([codec.stop_ids[0]] if closed else [])]
        episode.accept(Completion(request.request_id, tuple(ids), (0.0,) * len(ids), turn["stop_reason"]))
    if episode.ended is None:
        # The model would be asked for more. Only a token limit or a fault of the harness can be why it was not.
        episode.ended = "error" if record["ended"] == "error" else _ENDED_BY_TOKENS
        episode.error = record["error"]
    return episode.record()


def differences(record: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[Difference]:
    """Every place where two records of an episode differ, apart from what a replay cannot know."""
    found: list[Difference] = []
    for where, old, new in _different(_comparable(record), _comparable(replayed), ""):
        found.append(Difference(str(record["question_id"]), int(record["sample"]), where, _show(old), _show(new)))
    return found


def _comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON, because a tuple or an integer key reads back as another type.
    plain: dict[str, Any] = json.loads(json.dumps(record))
    turns = [{k: v for k, v in turn.items() if k not in _NOT_REPLAYED_IN_TURN} for turn in plain["turns"]]
    return {key: value for key, value in plain.items() if key not in _NOT_REPLAYED} | {"turns": turns}


def _different(old: Any, new: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _different(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True), 1):
            yield from _different(a, b, f"{where}[{number}]")
    elif old != new:
        yield where, old, new


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split()) or "(empty)"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def run_settings(about: Mapping[str, Any], changed: Mapping[str, Any], folder: Path) -> EvalConfig:
    """The config that loads a run's questions and limits again; `changed` are settings to use instead.

    SetupError when the run does not say where its questions came from.
    """
    if "source" not in about:
        raise SetupError(f"run {folder} does not say where its questions are: it was written by an older version")
    identity = about["identity"]
    # The engine decides which questions can be asked (the oracle needs a gold query).
    settings = {**about["source"], **identity["limits"], "mode": identity["mode"], "engine": identity["engine"]}
    return build_config({**settings, **changed}, EvalConfig, str(folder / RUN))


def episode_settings(identity: Mapping[str, Any], folder: Path) -> EpisodeConfig:
    """The episode's budgets as the run had them, without those in tokens. SetupError for budgets of another version."""
    budgets = {**identity["budgets"], "max_tokens": 1 << 31, "max_new_tokens": 1 << 30}
    try:
        return EpisodeConfig(mode=identity["mode"], **budgets)
    except TypeError as error:
        raise SetupError(f"run {folder} has budgets that this version does not know ({error})") from None


def replay_run(run: Run, about: Mapping[str, Any], config: EvalConfig) -> Replay:
    """Replay all episodes of a finished run. SetupError when questions or databases of the run are not there."""
    questions = load_benchmark(config)
    examples = {example.question_id: example for example in questions.examples}
    records = list(run.episodes.values())
    if missing := [r["question_id"] for r in records if r["question_id"] not in examples]:
        raise SetupError(
            f"{len(missing)} questions of {run.folder} are not in the data ({missing[0]} for one): "
            "give the run's own with --data, or --questions and --databases"
        )
    episode_config = episode_settings(about["identity"], run.folder)
    started = time.monotonic()
    with Sandbox(workers=config.workers) as sandbox:
        # Without the cache: golds run again, as everything else does.
        judge = Judge(config, sandbox, open_book(config, questions.benchmark, sandbox))

        def again(record: Mapping[str, Any]) -> list[Difference]:
            return differences(
                record, replay_record(record, examples[record["question_id"]], sandbox, episode_config, judge)
            )

        with ThreadPoolExecutor(config.workers, thread_name_prefix="replay") as pool:
            found = [difference for some in pool.map(again, records) for difference in some]
    summary = summarize(records, run.identity)
    found += [
        Difference("summary.json", 0, where, _show(old), _show(new))
        for where, old, new in _different(run.summary, json.loads(json.dumps(summary)), "")
    ]
    return Replay(
        episodes=len(records),
        calls=sum(len(turn["calls"]) for record in records for turn in record["turns"]),
        scored=sum(record["status"] == "scored" for record in records),
        seconds=time.monotonic() - started,
        differences=tuple(found),
        notes=tuple(_notes(run.identity, data_sha256(questions.benchmark, questions.examples))),
    )


def replay_record(
    record: Mapping[str, Any], example: Example, sandbox: Sandbox, config: EpisodeConfig, judge: Judge
) -> dict[str, Any]:
    """The record that a replay of this one gives."""
    episode = replay_episode(record, example, sandbox, config)
    if record["ended"] == "error" and episode.ended == "error":
        # What the fault was is not in the turns, so neither is what it did to the answer.
        episode = replace(episode, answer_sql=record["answer_sql"], origin=record["origin"])
    return judge.line(example, int(record["sample"]), episode)[0]


def _notes(identity: Mapping[str, Any], data: str) -> Iterator[str]:
    if data != identity["data_sha256"]:
        yield "questions or databases are not those of the run (data_sha256 differs)"
    if identity["prompt_sha256"] != PROMPT_SHA256:
        yield "the system prompt has changed since the run"
    for name, now in own_versions().items():
        if identity["versions"].get(name) != now:
            yield f"the run was made with {name} {identity['versions'].get(name)}, this is {now}"


def render(replay: Replay, folder: Path) -> str:
    """The outcome as text for a terminal."""
    lines = [
        f"{folder}: {replay.episodes:,} episodes, {replay.calls:,} calls, {replay.scored:,} verdicts "
        f"replayed in {replay.seconds:.1f} s"
    ]
    found = replay.differences
    if not found:
        lines.append("No difference: tools, endings, answers, verdicts and summary are what the run recorded.")
    for difference in found[:_SHOWN]:
        sample = f" sample {difference.sample}" if difference.sample else ""
        lines += [
            plain(f"{difference.question_id}{sample}  {difference.where}"),
            plain(f"    recorded  {difference.recorded}"),
            plain(f"    replayed  {difference.replayed}"),
        ]
    if found:
        episodes = len({(d.question_id, d.sample) for d in found})
        more = f", {len(found) - _SHOWN:,} of them not shown" if len(found) > _SHOWN else ""
        lines.append(f"differences: {len(found):,}, in {episodes:,} of the episodes{more}.")
        if clock := sum(difference.by_the_clock for difference in found):
            lines.append(f"{clock:,} of them are a query that ran out of time in one of the two.")
    return "\n".join([*lines, *(f"note: {note}" for note in replay.notes)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 1 when anything differs."""
    parser = ArgumentParser(prog="python -m eval.replay", description="Replay a finished run without its model.")
    parser.add_argument("run", type=Path, help="output folder of a finished eval.run")
    parser.add_argument("--data", type=Path, help="folder that holds the benchmarks, where it has moved")
    parser.add_argument("--questions", type=Path, help="questions JSON, where it has moved")
    parser.add_argument("--databases", type=Path, help="folder of the databases, where it has moved")
    parser.add_argument("--workers", type=int, help="processes that execute SQL (default 2)")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    arguments = vars(parser.parse_args(argv))
    folder, as_json = arguments.pop("run"), arguments.pop("json")
    run, about = load_run(folder), read_json(folder / RUN)
    changed = {
        key: str(value) if isinstance(value, Path) else value for key, value in arguments.items() if value is not None
    }
    outcome = replay_run(run, about, run_settings(about, changed, folder))
    if as_json:
        print(json.dumps(asdict(outcome), indent=2))
    else:
        # Without markup: what is shown was written by models and databases.
        Console(highlight=False, markup=False, soft_wrap=True).print(render(outcome, folder))
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    run_main(main)
