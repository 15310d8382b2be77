"""The SQaLe loader over small local folders in the package's format: joins, phrasings, filters, and what it says."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shared.data.sqale import PackedPayload, read_sqale
from shared.database import Database, Payload
from shared.errors import SetupError

pa = pytest.importorskip("pyarrow", reason="pyarrow comes with the sqale package")
pq = pytest.importorskip("pyarrow.parquet")

STYLES = (
    "verbose",
    "evidence_supported",
    "structured",
    "requirements_list",
    "short_ambiguous",
    "short_high_level",
    "casual",
    "spelling_grammar_mistakes",
)
DDL = "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT);"


def question(number: int, schema: str = "s1", **values: Any) -> dict[str, Any]:
    phrasings = values.pop("questions", {"verbose": f"Question {number}?"})
    return {
        "question_id": f"q{number}",
        "schema_id": schema,
        "sql": f"SELECT {number}",
        "difficulty": "simple",
        "questions": {style: phrasings.get(style) for style in STYLES},
        "relevant_tables": '["item"]',
        "number_of_relevant_tables": 1,
        "execution_result": "[[1]]",
    } | values


def schema(name: str) -> dict[str, Any]:
    content = {"item": [{"id": 1, "name": f"ant of {name}"}]}
    return {"schema_id": name, "full_schema": DDL, "schema_content": json.dumps(content), "number_of_tables": 1}


class Folders:
    """Writes the two halves of a split and loads them."""

    def __init__(self, root: Path) -> None:
        self.queries, self.schemas = root / "queries", root / "schemas"

    def write(self, queries: list[Any], schemas: list[Any], split: str = "train", form: str = "parquet") -> "Folders":
        for folder, rows in ((self.queries, queries), (self.schemas, schemas)):
            if form == "parquet":
                (folder / "data").mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        return self

    def read(self, **options: Any) -> Any:
        return read_sqale(str(self.queries), str(self.schemas), **options)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_questions_are_joined_with_their_schemas(folders: Folders, form: str) -> None:
    rows = [question(1, "s2"), question(2, "s1"), question(3, "s2")]
    loaded = folders.write(rows, [schema("s1"), schema("s2"), schema("s3")], form=form).read()
    assert [(e.question_id, e.db_id, e.gold_sql, e.question) for e in loaded.examples] == [
        ("q1", "s2", "SELECT 1", "Question 1?"),
        ("q2", "s1", "SELECT 2", "Question 2?"),
        ("q3", "s2", "SELECT 3", "Question 3?"),
    ]
    first, second, third = loaded.examples
    assert first.database is third.database
    assert first.database.payload is not None
    assert "ant of s2" in first.database.payload.schema_content
    assert second.database.payload is not None
    assert second.database.payload.full_schema == DDL
    assert (first.benchmark, first.difficulty, first.evidence) == ("sqale", "simple", "")
    assert first.meta == {"phrasing": "verbose", "relevant_tables": ("item",)}
    assert loaded.skipped == {}


def test_single_files_are_read_whatever_the_split(folders: Folders) -> None:
    folders.write([question(1)], [schema("s1")])
    files = [next(folder.rglob("*.parquet")) for folder in (folders.queries, folders.schemas)]
    assert len(read_sqale(str(files[0]), str(files[1]), split="test").examples) == 1


def test_placeholder_phrasings_are_left_out_and_counted(folders: Folders) -> None:
    texts = ["Real?", "...", "<string>", "**Moderate**", "", "  ", None]
    rows = [question(i, questions={"casual": text}) for i, text in enumerate(texts)]
    loaded = folders.write(rows, [schema("s1")]).read(phrasing="casual")
    assert [e.question for e in loaded.examples] == ["Real?"]
    assert loaded.skipped == {"without a usable phrasing (casual)": 6}
    assert loaded.summary() == "1 questions over 1 databases (left out: 6 without a usable phrasing (casual))"


def test_any_phrasing_takes_the_first_usable(folders: Folders) -> None:
    rows = [question(1, questions={"verbose": "...", "casual": "hey?", "structured": "- n"}), question(2)]
    loaded = folders.write(rows, [schema("s1")]).read(phrasing="any")
    assert [(e.question, e.meta["phrasing"]) for e in loaded.examples] == [
        ("- n", "structured"),
        ("Question 2?", "verbose"),
    ]


def test_difficulties_and_limit(folders: Folders) -> None:
    levels = ["simple", "Hard", "moderate", "hard", "hard"]
    folders.write([question(i, difficulty=level) for i, level in enumerate(levels)], [schema("s1")])
    loaded = folders.read(difficulties=["hard"], limit=2)
    assert [(e.question_id, e.difficulty) for e in loaded.examples] == [("q1", "hard"), ("q3", "hard")]
    assert loaded.skipped == {"of other difficulties": 2}
    with pytest.raises(SetupError, match="unknown SQaLe difficulty 'easy': one of simple, moderate, hard"):
        folders.read(difficulties=["easy"])


def test_questions_that_cannot_be_used_are_counted(folders: Folders) -> None:
    rows = [question(1), question(2, sql=" "), question(3, sql=None), question(4, "gone")]
    loaded = folders.write(rows, [schema("s1")]).read()
    assert [e.question_id for e in loaded.examples] == ["q1"]
    assert loaded.skipped == {"without gold SQL": 2, "whose schema is not in the split": 1}


@pytest.mark.parametrize("tables", ["not json", "7", None, '{"a": 1}'])
def test_odd_relevant_tables(folders: Folders, tables: Any) -> None:
    loaded = folders.write([question(1, relevant_tables=tables)], [schema("s1")], form="jsonl").read()
    assert loaded.examples[0].meta["relevant_tables"] == ()


def test_columns_of_the_older_releases(folders: Folders) -> None:
    row = {
        "schema id": "s1",
        "question id": "q1",
        "sql statament": "SELECT 1",  # spelled so in the dataset
        "difficulty": "simple",
        "questions": json.dumps({"verbose (original)": "How many?"}),
        "Full schema": DDL,
        "Schema content": {"item": [{"id": 1}]},
    }
    (example,) = folders.write([row], [row], form="jsonl").read().examples
    assert (example.question, example.gold_sql) == ("How many?", "SELECT 1")
    assert example.database.payload is not None
    assert json.loads(example.database.payload.schema_content) == {"item": [{"id": 1}]}


def test_splits_do_not_mix(folders: Folders) -> None:
    folders.write([question(1)], [schema("s1")], "train").write([question(2)], [schema("s1")], "test")
    assert [e.question_id for e in folders.read(split="test").examples] == ["q2"]
    with pytest.raises(SetupError, match="has no split 'dev': it has test, train"):
        folders.read(split="dev")


def test_a_folder_with_another_split_only_is_refused(folders: Folders) -> None:
    # The package takes the files of a folder without the wanted split for files that are not split at all.
    for folder, row in ((folders.queries, question(1)), (folders.schemas, schema("s1"))):
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    with pytest.raises(SetupError, match="has no split 'test': it has train"):
        folders.read(split="test")


def test_unusable_sources(folders: Folders, tmp_path: Path) -> None:
    folders.write([question(1)], [schema("s1")])
    ok = str(folders.schemas)
    with pytest.raises(SetupError, match=r"nowhere .split train. cannot be read"):
        read_sqale(str(tmp_path / "nowhere"), ok)
    with pytest.raises(SetupError, match="no column 'question_id'"):
        read_sqale(ok, ok)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SetupError, match=r"broken\.parquet .*cannot be read"):
        read_sqale(str(tmp_path / "broken.parquet"), ok)
    (tmp_path / "broken.jsonl").write_text("{oops\n")
    with pytest.raises(SetupError, match=r"broken\.jsonl .*cannot be read"):
        read_sqale(str(tmp_path / "broken.jsonl"), ok)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match=r"empty .*cannot be read"):
        read_sqale(str(tmp_path / "empty"), ok)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(SetupError, match="is left: the split is empty"):
        read_sqale(str(tmp_path / "none.jsonl"), ok)
    with pytest.raises(SetupError, match="unknown SQaLe phrasing 'formal': one of verbose"):
        read_sqale(str(folders.queries), ok, phrasing="formal")


def test_a_hub_repository_that_cannot_be_reached(folders: Folders) -> None:
    folders.write([question(1)], [schema("s1")])
    with pytest.raises(SetupError, match=r"offline-test/queries .*cannot be read.*give a local folder") as caught:
        read_sqale("offline-test/queries", str(folders.schemas))
    assert "\n" not in str(caught.value)


def test_repeated_and_missing_ids(folders: Folders) -> None:
    folders.write([question(1), question(1)], [schema("s1")])
    with pytest.raises(SetupError, match="question_id q1 2 times"):
        folders.read()
    folders.write([question(1, question_id=None)], [schema("s1")])
    with pytest.raises(SetupError, match="without question_id"):
        folders.read()


def test_a_packed_payload_is_a_payload() -> None:
    content = json.dumps({"item": [{"id": i, "name": f"name {i} é \ud800"} for i in range(2000)]}, ensure_ascii=False)
    packed = PackedPayload(DDL, content)
    assert (packed.full_schema, packed.schema_content) == (DDL, content)
    plain = Payload(DDL, content)
    assert Database("s", payload=packed).content_hash == Database("s", payload=plain).content_hash
    copy = pickle.loads(pickle.dumps(packed))
    assert copy == packed
    assert hash(copy) == hash(packed)
    assert len(pickle.dumps(packed)) < len(content) / 4


def test_real_rows(test_data: Path) -> None:
    queries, schemas = (str(test_data / "data" / "sqale" / name) for name in ("sqale2_queries", "sqale2_schemas"))
    train, test = (read_sqale(queries, schemas, split=split) for split in ("train", "test"))
    assert (len(train.examples), len(test.examples)) == (9, 3)
    assert not {e.db_id for e in train.examples} & {e.db_id for e in test.examples}
    assert read_sqale(queries, schemas, phrasing="casual").skipped == {"without a usable phrasing (casual)": 8}
