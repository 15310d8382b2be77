"""Generated databases with questions: small enough to learn in minutes, and not answerable without looking.

    python -m shared.data.toy --out DIR --split heldout --databases 60 --questions 400 --seed 0

writes DIR/questions.json (BIRD's keys) and DIR/databases/<db_id>/<db_id>.sqlite, which `load_questions` reads.

A name is two syllables, and the splits share the syllables but no name, so a model has to copy what it reads. A
question says `rabo`; in its database the table is `rabo_ink` and the column `tesu_org`: one suffix for all tables
and one for all columns of a database, drawn anew for each. Only the tools reveal them. Every question has one right
meaning: the gold result differs from that of every other kind of question over the same names.
"""

import json
import random
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from shared.cli import ArgumentParser, run_main
from shared.data.example import Example
from shared.database import Database
from shared.errors import SetupError
from shared.files import replacing, write_atomic

Split = Literal["train", "heldout"]
Row = tuple[int, ...]

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = tuple(c + v for c, v in product(_CONSONANTS, _VOWELS))
FIRST_SYLLABLES = _SYLLABLES[0:64:2]
SECOND_SYLLABLES = _SYLLABLES[1:64:2]
_ENDINGS = ("ath", "ard", "ax", "ek", "ell", "esh", "il", "ing", "ist", "omp", "on", "ord", "ub", "unk", "uss", "yx")
SUFFIXES = tuple(f"_{ending}" for ending in _ENDINGS)
_KEYWORDS = {"like"}  # the one SQL keyword that two syllables spell
_HELD_OUT_SHARE = 5  # one name in five


@dataclass(frozen=True)
class Kind:
    """A kind of question: its wording, its query, how hard it is called.

    `{t}`, `{a}`, `{b}` stand for a table and two of its columns, `{v}` for a value of `a`. A joining kind has
    `{p}`, the table that `{p}_id` of `t` refers to, and `{c}`, a column of `p`; `{v}` is a value of `c` then.
    """

    question: str
    sql: str
    difficulty: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "count": Kind("How many {t} are there?", "SELECT COUNT(*) FROM {t}", "simple"),
        "list": Kind("List the {a} of every {t}.", "SELECT {a} FROM {t}", "simple"),
        "max": Kind("What is the highest {a} of any {t}?", "SELECT MAX({a}) FROM {t}", "simple"),
        "min": Kind("What is the lowest {a} of any {t}?", "SELECT MIN({a}) FROM {t}", "simple"),
        "sum": Kind("What is the total {a} of all {t}?", "SELECT SUM({a}) FROM {t}", "simple"),
        "avg": Kind("What is the average {a} of all {t}?", "SELECT AVG({a}) FROM {t}", "simple"),
        "count_where": Kind("How many {t} have {a} {v}?", "SELECT COUNT(*) FROM {t} WHERE {a} = {v}", "moderate"),
        "list_where": Kind(
            "List the {b} of every {t} with {a} {v}.", "SELECT {b} FROM {t} WHERE {a} = {v}", "moderate"
        ),
        "top": Kind(
            "What is the {b} of the {t} with the highest {a}?",
            "SELECT {b} FROM {t} ORDER BY {a} DESC LIMIT 1",
            "moderate",
        ),
        "group": Kind(
            "For each {a} of {t}, what is the total {b}?", "SELECT {a}, SUM({b}) FROM {t} GROUP BY {a}", "hard"
        ),
        "join": Kind(
            "List the {a} of every {t} and the {c} of its {p}.",
            "SELECT T1.{a}, T2.{c} FROM {t} AS T1 JOIN {p} AS T2 ON T1.{p}_id = T2.id",
            "hard",
        ),
        "join_where": Kind(
            "List the {a} of every {t} whose {p} has {c} {v}.",
            "SELECT T1.{a} FROM {t} AS T1 JOIN {p} AS T2 ON T1.{p}_id = T2.id WHERE T2.{c} = {v}",
            "hard",
        ),
    }
)
_JOINS = ("join", "join_where")


@dataclass(frozen=True)
class ToyTable:
    """A table by its bare names; rows leave the id out.

    `groups` is the one column whose values repeat. With a `parent`, the last value of a row is the id of a row of that
    table.
    """

    name: str
    columns: tuple[str, ...]
    groups: str
    rows: tuple[Row, ...]
    parent: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of question that can be asked about it."""
        return tuple(kind for kind in KINDS if self.parent is not None or kind not in _JOINS)


@dataclass(frozen=True)
class ToyDatabase:
    """Tables, and the suffixes that their real names carry."""

    db_id: str
    tables: tuple[ToyTable, ...]
    table_suffix: str
    column_suffix: str

    def create_sql(self, table: ToyTable) -> str:
        """The CREATE TABLE statement, on one line."""
        columns = [f"{column}{self.column_suffix} INTEGER" for column in table.columns]
        if table.parent is not None:
            target = table.parent + self.table_suffix
            columns.append(f"{target}_id INTEGER REFERENCES {target}(id)")
        return f"CREATE TABLE {table.name}{self.table_suffix} (id INTEGER PRIMARY KEY, {', '.join(columns)})"

    def fill(self, connection: sqlite3.Connection) -> None:
        """Create and fill the tables."""
        for table in self.tables:
            connection.execute(self.create_sql(table))
            marks = ", ".join("?" for _ in table.rows[0])
            connection.executemany(f"INSERT INTO {table.name}{self.table_suffix} VALUES (NULL, {marks})", table.rows)
        connection.commit()


@dataclass(frozen=True)
class ToyQuestion:
    """A question by its bare names: see `Kind` for what they stand for; `c` is empty where the table has no parent."""

    question_id: str
    database: ToyDatabase
    kind: str
    table: ToyTable
    a: str
    b: str
    c: str
    v: int

    @property
    def text(self) -> str:
        """The question in words, with bare names."""
        return KINDS[self.kind].question.format(
            t=self.table.name, a=self.a, b=self.b, p=self.table.parent, c=self.c, v=self.v
        )

    @property
    def gold_sql(self) -> str:
        """The right query."""
        return self.sql(self.database.table_suffix, self.database.column_suffix)

    def sql(self, table_suffix: str, column_suffix: str, kind: str | None = None) -> str:
        """The query with other suffixes, or of another kind: what an agent writes that guesses or errs."""
        return KINDS[kind or self.kind].sql.format(
            t=self.table.name + table_suffix,
            p=(self.table.parent or "") + table_suffix,
            a=self.a + column_suffix,
            b=self.b + column_suffix,
            c=self.c + column_suffix,
            v=self.v,
        )


def toy_names(split: Split) -> list[tuple[str, str]]:
    """The names of a split as pairs of syllables; every syllable occurs in both splits, no name does."""
    names = []
    for (i, first), (j, second) in product(enumerate(FIRST_SYLLABLES), enumerate(SECOND_SYLLABLES)):
        held_out = (7 * i + 3 * j) % _HELD_OUT_SHARE == 0
        if held_out == (split == "heldout") and first + second not in _KEYWORDS:
            names.append((first, second))
    return names


def toy_questions(split: Split, n_databases: int, n_questions: int, seed: int) -> list[ToyQuestion]:
    """`n_questions` over `n_databases`, spread evenly over databases and kinds: a pure function of its arguments.

    Raises SetupError for counts below 1, or fewer questions than databases.
    """
    if split not in get_args(Split):
        raise SetupError(f"split '{split}' does not exist: give train or heldout")
    if not 1 <= n_databases <= n_questions:
        raise SetupError(f"{n_databases} databases and {n_questions} questions: give at least one question a database")
    rng = random.Random(f"{split}/{seed}")
    names = toy_names(split)
    databases = [_database(f"{split}{seed}_{i:04d}", names, rng) for i in range(n_databases)]
    kinds = list(KINDS)
    questions: list[ToyQuestion] = []
    connections: dict[str, sqlite3.Connection] = {}
    try:
        for i in range(n_questions):
            if i % len(kinds) == 0:
                rng.shuffle(kinds)
            database = databases[i % n_databases]
            if database.db_id not in connections:
                connections[database.db_id] = sqlite3.connect(":memory:")
                database.fill(connections[database.db_id])
            question_id = f"toy_{split}{seed}_{i:05d}"
            questions.append(_question(question_id, database, kinds[i % len(kinds)], rng, connections[database.db_id]))
    finally:
        for connection in connections.values():
            connection.close()
    return questions


def _database(db_id: str, names: Sequence[tuple[str, str]], rng: random.Random) -> ToyDatabase:
    """Two or three tables of three or four columns; all others refer to the first. No two names share a syllable."""
    n_columns = [rng.randint(3, 4) for _ in range(rng.randint(2, 3))]
    words = _unalike(names, len(n_columns) + sum(n_columns), rng)
    n_rows = rng.sample(range(6, 10), len(n_columns))  # of different sizes, so that counts differ
    table_suffix, column_suffix = rng.sample(SUFFIXES, 2)
    tables: list[ToyTable] = []
    for n, size in zip(n_columns, n_rows, strict=True):
        columns = tuple(words.pop() for _ in range(n))
        groups = rng.choice(columns)
        values = [_values(size, column == groups, rng) for column in columns]
        if tables:
            values.append(_links(tables[0], size, rng))
        parent = tables[0].name if tables else None
        tables.append(ToyTable(words.pop(), columns, groups, tuple(zip(*values, strict=True)), parent))
    rng.shuffle(tables)
    return ToyDatabase(db_id, tuple(tables), table_suffix, column_suffix)


def _unalike(names: Sequence[tuple[str, str]], n: int, rng: random.Random) -> list[str]:
    taken: set[str] = set()
    words: list[str] = []
    for first, second in rng.sample(names, len(names)):
        if len(words) == n:
            break
        if first not in taken and second not in taken:
            taken |= {first, second}
            words.append(first + second)
    return words


def _values(size: int, repeating: bool, rng: random.Random) -> list[int]:
    """Two-digit numbers: all different, or two or three different ones, each at least twice."""
    if not repeating:
        return rng.sample(range(10, 100), size)
    groups = rng.sample(range(10, 100), rng.randint(2, 3))
    values = groups * 2 + [rng.choice(groups) for _ in range(size - 2 * len(groups))]
    rng.shuffle(values)
    return values


def _links(parent: ToyTable, size: int, rng: random.Random) -> list[int]:
    """Ids of rows of `parent`, of at least two of its groups: so that a condition on the group tells rows apart."""
    column = parent.columns.index(parent.groups)
    groups: dict[int, list[int]] = {}
    for row_id, row in enumerate(parent.rows, 1):
        groups.setdefault(row[column], []).append(row_id)
    links = [rng.choice(ids) for ids in groups.values()]
    links += [rng.randint(1, len(parent.rows)) for _ in range(size - len(links))]
    rng.shuffle(links)
    return links


def _question(
    question_id: str, database: ToyDatabase, kind: str, rng: random.Random, connection: sqlite3.Connection
) -> ToyQuestion:
    """A question of `kind` whose gold result is not empty, and is that of no other kind over the same names."""
    tables = [table for table in database.tables if kind in table.kinds]
    while True:
        table = rng.choice(tables)
        measures = [column for column in table.columns if column != table.groups]
        rng.shuffle(measures)
        a = table.groups if kind in ("count_where", "list_where", "group") else measures.pop()
        parent = next((other for other in database.tables if other.name == table.parent), None)
        c = parent.groups if parent is not None else ""
        source, filtered = (parent, c) if parent is not None and kind == "join_where" else (table, a)
        v = rng.choice(source.rows)[source.columns.index(filtered)]
        question = ToyQuestion(question_id, database, kind, table, a, measures.pop(), c, v)
        results = {other: _result(question, other, connection) for other in table.kinds}
        gold = results.pop(kind)
        if gold and gold not in results.values():
            return question


def _result(question: ToyQuestion, kind: str, connection: sqlite3.Connection) -> frozenset[Row]:
    database = question.database
    sql = question.sql(database.table_suffix, database.column_suffix, kind)
    return frozenset(connection.execute(sql).fetchall())


def toy_examples(split: Split, n_databases: int, n_questions: int, seed: int, out_dir: Path) -> list[Example]:
    """`toy_questions` written to `out_dir` and as examples. A folder that holds the same questions is kept as it is.

    Raises SetupError when the folder cannot be written, or holds other questions.
    """
    return write_toy(toy_questions(split, n_databases, n_questions, seed), out_dir)


def write_toy(questions: Sequence[ToyQuestion], out_dir: Path) -> list[Example]:
    """Write questions.json and the databases under `out_dir`; the questions file last: it marks the end."""
    text = "[\n" + ",\n".join(json.dumps(_record(question)) for question in questions) + "\n]\n"
    target = out_dir / "questions.json"
    try:
        if not target.is_file():
            _write_databases({q.database.db_id: q.database for q in questions}.values(), out_dir / "databases")
            write_atomic(target, text)
        elif target.read_text(encoding="utf-8") != text:
            raise SetupError(f"{target} holds other questions; remove {out_dir} or give another folder")
    except OSError as error:
        raise SetupError(f"{out_dir} cannot be written: {error}; give another folder") from error
    return [_example(question, out_dir / "databases") for question in questions]


def _record(question: ToyQuestion) -> dict[str, Any]:
    return {
        "question_id": question.question_id,
        "db_id": question.database.db_id,
        "question": question.text,
        "SQL": question.gold_sql,
        "difficulty": KINDS[question.kind].difficulty,
        "kind": question.kind,
    }


def _example(question: ToyQuestion, databases: Path) -> Example:
    db_id = question.database.db_id
    return Example(
        question_id=question.question_id,
        db_id=db_id,
        question=question.text,
        gold_sql=question.gold_sql,
        database=Database(db_id, path=databases / db_id / f"{db_id}.sqlite"),
        difficulty=KINDS[question.kind].difficulty,
        benchmark="toy",
        meta={"kind": question.kind},
    )


def _write_databases(databases: Iterable[ToyDatabase], folder: Path) -> None:
    for database in databases:
        path = folder / database.db_id / f"{database.db_id}.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch, closing(sqlite3.connect(scratch)) as connection:
            database.fill(connection)


def main(argv: list[str] | None = None) -> None:
    """Write a folder of toy questions."""
    parser = ArgumentParser(prog="python -m shared.data.toy", description="Generate toy databases.")
    parser.add_argument("--out", type=Path, required=True, help="folder for questions.json and databases/")
    parser.add_argument("--split", choices=get_args(Split), required=True)
    parser.add_argument("--databases", type=int, default=60)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    examples = toy_examples(arguments.split, arguments.databases, arguments.questions, arguments.seed, arguments.out)
    print(f"{arguments.out}: {len(examples)} {arguments.split} questions over {arguments.databases} databases")


if __name__ == "__main__":
    run_main(lambda: main())
