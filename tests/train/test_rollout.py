"""From episodes to training rows: pairing, seeds, modes, gold that cannot be used, truncation."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.chat import ByteCodec, ChatCodec
from shared.data.example import Example
from shared.engines.base import Completion, Request
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from tests.train import scripted_run as scripted
from train.config import TrainConfig
from train.pool import Pool, build_pool, select
from train.reward import Gold
from train.rollout import (
    Group,
    Question,
    Scorer,
    StepDraw,
    add_sums,
    check_weights,
    question_mode,
    rollout_sums,
    run_groups,
    score_groups,
    summarize,
    training_rows,
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(1) as sandbox:
        yield sandbox


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    made: Pool = scripted.shop_pool(tmp_path)
    return made


def _config(tmp_path: Path, *overrides: str) -> TrainConfig:
    config: TrainConfig = scripted.make_config(tmp_path, Path("owner/name"), overrides)
    return config


class TurnEngine:
    """Says what `turn(request)` returns, as ids and a stop reason; log-probs are -0.5."""

    batches_by_itself = False

    def __init__(self, codec: ChatCodec, turn: Any) -> None:
        self.codec, self.turn = codec, turn
        self.queue: list[Request] = []
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        self.queue.append(request)
        self.requests.append(request)

    def step(self) -> list[Completion]:
        # The last first, and one at a time: nothing may depend on the order.
        request = self.queue.pop()
        ids, reason = self.turn(request)
        return [Completion(request.request_id, tuple(ids), (-0.5,) * len(ids), reason, "w")]

    def has_work(self) -> bool:
        return bool(self.queue)

    def end_session(self, session: str) -> None:
        pass

    def close(self) -> None:
        pass


def _hash_turn(codec: ChatCodec, ids: Sequence[int]) -> list[int]:
    """A turn that only this context could have produced; how many turns an episode takes depends on it, too."""
    digest = hashlib.sha256(repr(list(ids)).encode()).hexdigest()
    if int(digest[:2], 16) % 4 == 0:
        return codec.turn_ids(f'{digest}</think>{{"tool": "submit_sql", "args": {{"sql": "SELECT 1 -- {digest}"}}}}')
    return codec.turn_ids(f'{digest}</think>{{"tool": "list_tables"}}')


def test_every_completion_stays_with_its_own_context(tmp_path: Path, pool: Pool, sandbox: Sandbox) -> None:
    """A fake engine that answers with a hash of its prompt: two questions x four, episodes of one to six turns."""
    codec = ByteCodec()
    config = _config(tmp_path, "rollout.max_turns=6", "rollout.max_tokens=20000")
    questions = [Question(i, pool.examples[i], 0.5, "withheld" if i else "full") for i in range(2)]
    engine = TurnEngine(codec, lambda request: (_hash_turn(codec, request.prompt_ids), "stop"))
    episodes = run_groups(questions, 3, config, engine, codec, sandbox)
    assert [len(records) for records in episodes] == [4, 4]
    lengths = Counter(len(record.turns) for records in episodes for record in records)
    assert len(lengths) > 1
    for question, records in zip(questions, episodes, strict=True):
        assert {record.question_id for record in records} == {question.example.question_id}
        assert {record.mode for record in records} == {question.mode}
        for record in records:
            for turn in record.turns:
                said = record.ids[turn.start : turn.start + turn.n_tokens]
                assert said == _hash_turn(codec, record.ids[: turn.start])
    seeds = [record.seed for records in episodes for record in records]
    assert len(set(seeds)) == 8


def test_seeds_depend_on_question_and_candidate_not_on_rank_or_batch(
    tmp_path: Path, pool: Pool, sandbox: Sandbox
) -> None:
    codec = ByteCodec()
    config = _config(tmp_path)
    questions = [Question(i, pool.examples[i], 0.5, "withheld") for i in range(4)]

    def seeds(some: Sequence[Question], concurrency: int) -> list[list[int]]:
        engine = TurnEngine(codec, lambda request: (codec.turn_ids("no"), "stop"))
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"concurrency": concurrency})})
        return [[r.seed for r in records] for records in run_groups(some, 3, changed, engine, codec, sandbox)]

    assert seeds(questions, 256) == seeds(questions[:2], 3) + seeds(questions[2:], 1)


def test_the_share_of_withheld_questions(pool: Pool) -> None:
    example = pool.examples[0]
    for share in (0.0, 0.3, 1.0):
        modes = [question_mode(0, step, example, share) for step in range(2000)]
        assert modes.count("withheld") / 2000 == pytest.approx(share, abs=0.04)
        assert modes == [question_mode(0, step, example, share) for step in range(2000)]


GOLDS = [
    ("SELECT name FROM item", None),
    ("SELECT name FROM item WHERE id > 9", "gold_empty"),
    ("SELECT name FROM nowhere", "gold_fails"),
    ("SELEC", "gold_fails"),
    ("DELETE FROM item", "gold_fails"),
    ("SELECT NULL", None),
    ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r", "gold_fails"),
]


@pytest.mark.parametrize(("sql", "problem"), GOLDS)
def test_gold_that_cannot_be_used_is_never_charged_to_the_model(
    tmp_path: Path, pool: Pool, sandbox: Sandbox, sql: str, problem: str | None
) -> None:
    config = _config(tmp_path, "rollout.query_seconds=1.0")
    example = replace(pool.examples[0], gold_sql=sql)
    gold = Scorer(config, sandbox).gold(example)
    assert (None if isinstance(gold, Gold) else gold) == problem
    if problem is not None:
        with pytest.raises(ValueError, match=problem):
            Scorer(config, sandbox).score(example, ["SELECT 1"])


def test_an_empty_gold_can_be_kept(tmp_path: Path, pool: Pool, sandbox: Sandbox) -> None:
    scorer = Scorer(_config(tmp_path, "data.empty_gold=keep"), sandbox)
    example = replace(pool.examples[0], gold_sql="SELECT 1 WHERE 0")
    scores = scorer.score(example, ["SELECT 2 WHERE 0", None, "SELECT NULL"])
    assert [score.exact for score in scores] == [True, False, False]
    assert scores[1].reward == 0


def test_a_question_without_usable_gold_is_replaced_by_the_next_drawn(
    tmp_path: Path, pool: Pool, sandbox: Sandbox
) -> None:
    config = _config(tmp_path)
    broken = {pool.examples[i].question_id for i in range(0, 24, 3)}
    mixed = Pool(
        [replace(e, gold_sql="SELECT * FROM nowhere") if e.question_id in broken else e for e in pool.examples],
        pool.lengths,
        pool.quantiles,
    )
    scorer, passed_over = Scorer(config, sandbox), 0
    for step in range(5):
        drawn = StepDraw(mixed, step, config, scorer)
        questions = drawn.first(6)
        assert len({question.example.question_id for question in questions}) == 6
        assert not broken & {question.example.question_id for question in questions}
        assert StepDraw(mixed, step, config, Scorer(config, sandbox)).first(6) == questions
        passed_over += sum(drawn.skipped.values())
    assert passed_over > 0
    useless = Pool([replace(e, gold_sql="SELEC") for e in pool.examples], pool.lengths, pool.quantiles)
    with pytest.raises(SetupError, match="only 0 of 24 drawn questions have a usable gold"):
        StepDraw(useless, 0, config, Scorer(config, sandbox)).first(6)


def test_a_missing_database_stops_the_run_and_is_not_a_reward_of_zero(
    tmp_path: Path, pool: Pool, sandbox: Sandbox
) -> None:
    from shared.database import Database

    scorer = Scorer(_config(tmp_path), sandbox)
    gone = replace(pool.examples[0], database=Database("gone", path=tmp_path / "gone.sqlite"))
    with pytest.raises(SetupError, match="gone"):
        scorer.gold(gone)
    assert not (tmp_path / "gone.sqlite").exists()


def _turns(codec: ChatCodec, texts: Sequence[tuple[list[int], str]]) -> TurnEngine:
    return TurnEngine(codec, lambda request: texts[min(request.context["turn"], len(texts) - 1)])


GOLD = "SELECT name FROM item WHERE id > 0"
SUBMIT = 'so</think>{"tool": "submit_sql", "args": {"sql": "' + GOLD + '"}}'
LOOK = 'look</think>{"tool": "run_query", "args": {"sql": "SELECT * FROM item"}}'


def test_five_ways_to_end_give_the_right_flag_reward_and_ids_in_the_loss(
    tmp_path: Path, pool: Pool, sandbox: Sandbox
) -> None:
    codec = ByteCodec()
    config = _config(tmp_path, "rollout.max_turns=2")
    question = Question(0, replace(pool.examples[0], gold_sql=GOLD), 0.5, "withheld")
    submit, look = codec.turn_ids(SUBMIT), codec.turn_ids(LOOK)
    prompt = len(_one(question, config, _turns(codec, [(submit, "stop")]), codec, sandbox)[0].ids) - len(submit)
    newline = [*submit, *codec.encode_text("\n")]
    half = submit[: len(submit) // 2]
    tight = prompt + len(look) + 40  # room for the turn, none for its result
    cases: list[tuple[list[tuple[list[int], str]], int, str, bool, float, int]] = [
        # turns, episode budget, ended, truncated, reward, sampled ids
        ([(submit, "stop")], 8000, "submitted", False, 3.2, len(submit)),
        ([(newline, "stop")], 8000, "submitted", False, 3.2, len(newline)),
        ([(look, "stop"), (look, "stop"), (codec.turn_ids("no idea"), "stop")], 8000, "final_turn", False, 0.0, 0),
        ([(half, "length"), (half, "length"), (half, "length")], 8000, "final_turn", True, 0.0, 3 * len(half)),
        ([(look, "stop")], tight, "token_limit", True, 0.0, len(look)),
    ]
    for turns, budget, ended, truncated, reward, sampled in cases:
        limited = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_tokens": budget})})
        records = _one(question, limited, _turns(codec, turns), codec, sandbox)
        group = score_groups([question], [records], Scorer(limited, sandbox), 1)[0]
        assert {record.ended for record in records} == {ended}
        assert {record.truncated for record in records} == {truncated}
        assert [score.reward for score in group.scores] == pytest.approx([reward] * 4)
        for record in records:
            assert sum(record.mask) == sum(turn.n_tokens for turn in record.turns)
            assert sampled in (0, sum(record.mask))
            assert len(record.ids) == len(record.mask) == len(record.logprobs) <= budget
        # All candidates of a group alike: nothing to learn, whatever way they ended.
        assert training_rows([group], limited) == []


def _one(question: Question, config: TrainConfig, engine: TurnEngine, codec: ChatCodec, sandbox: Sandbox) -> list[Any]:
    return run_groups([question], 0, config, engine, codec, sandbox)[0]


@pytest.fixture
def mixed_group(tmp_path: Path, pool: Pool, sandbox: Sandbox) -> tuple[Group, TrainConfig]:
    """Candidates 0 and 2 submit the gold, 1 and 3 nothing."""
    codec, config = ByteCodec(), _config(tmp_path)
    question = Question(0, replace(pool.examples[0], gold_sql=GOLD), 0.25, "withheld")

    def turn(request: Request) -> tuple[list[int], str]:
        right = int(request.session.partition(":")[0]) % 2 == 0
        return codec.turn_ids(SUBMIT if right else "no"), "stop"

    records = _one(question, config, TurnEngine(codec, turn), codec, sandbox)
    return score_groups([question], [records], Scorer(config, sandbox), 1)[0], config


def test_rows_carry_the_episodes_ids_mask_and_advantage(mixed_group: tuple[Group, TrainConfig]) -> None:
    group, config = mixed_group
    rows = training_rows([group], config)
    assert [row.advantage for row in rows] == pytest.approx([1.6, -1.6, 1.6, -1.6])
    for row, record in zip(rows, group.episodes, strict=True):
        assert (row.ids, row.mask, row.sampler_logprobs) == (record.ids, record.mask, record.logprobs)


def test_figures_add_up_over_ranks(mixed_group: tuple[Group, TrainConfig]) -> None:
    group, config = mixed_group
    one, two = rollout_sums([group], config), rollout_sums([group, group], config)
    assert summarize(add_sums([one, two, {}])) == pytest.approx(summarize(rollout_sums([group] * 3, config)))
    summary = summarize(one)
    assert summary["exact"] == summary["tier_equivalent"] == 0.5
    assert summary["reward"] == pytest.approx(1.6)
    assert summary["origin_submitted"] == 0.5
    assert summary["quantile"] == 0.25
    assert summarize({})["reward"] == 0.0


def test_foreign_weights_are_refused(mixed_group: tuple[Group, TrainConfig]) -> None:
    group, _ = mixed_group
    check_weights([group], "w")
    with pytest.raises(RuntimeError, match="sampled from weights w, the trainer holds other"):
        check_weights([group], "other")


def test_selection_of_the_pool(tmp_path: Path, pool: Pool) -> None:
    levels = ["simple", "Moderate", "hard", ""]
    examples = [replace(e, difficulty=levels[i % 4]) for i, e in enumerate(pool.examples)]
    examples[0] = replace(examples[0], gold_sql=" ")

    def kept(*overrides: str) -> list[Example]:
        return select(examples, _config(tmp_path, *overrides).data)

    assert len(kept()) == 23
    assert {e.difficulty for e in kept("data.difficulties=[simple, moderate]")} == {"simple", "Moderate"}
    assert len(kept("data.difficulties=[moderate]", "data.limit=2")) == 2
    with pytest.raises(SetupError, match="no question is 'extra'; the data has hard, moderate, simple"):
        kept("data.difficulties=[extra]")
    with pytest.raises(SetupError, match="pool is empty"):
        build_pool([])
    with pytest.raises(SetupError, match="occurs 2 times"):
        build_pool([examples[1], examples[1]])


def test_records_are_json(mixed_group: tuple[Group, TrainConfig]) -> None:
    from train.rollout import episode_lines

    group, _ = mixed_group
    lines = [json.loads(json.dumps(line)) for line in episode_lines([group], 7)]
    assert [line["score"]["exact"] for line in lines] == [True, False, True, False]
    assert lines[0]["step"] == 7
    assert "ids" not in lines[0]["episode"]
