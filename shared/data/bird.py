"""Questions in a JSON file over a folder of SQLite databases: BIRD, Spider, KaggleDBQA and all that is laid out so.

The file is a JSON array of objects, or JSON lines. Keys of an object: `db_id`, `question`, the gold query as `query`,
`SQL` or `sql`; optionally `evidence`, `difficulty`, `question_id`. The database of `db_id` is
`DIR/<db_id>/<db_id>.sqlite` (or .db).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shared.data.example import Example, Loaded
from shared.database import Database
from shared.errors import SetupError

GOLD_KEYS = ("query", "SQL", "sql")
SUFFIXES = (".sqlite", ".db", ".sqlite3")
_OTHER_KEYS = {"db_id", "question", "evidence", "difficulty", "question_id", *GOLD_KEYS}
_SQLITE_MAGIC = b"SQLite format 3\0"


def load_questions(
    questions: Path,
    databases: Path,
    benchmark: str = "custom",
    *,
    db_ids: Iterable[str] = (),
    present_only: bool = False,
) -> list[Example]:
    """The examples of `read_questions`, without its account of what was left out."""
    return read_questions(questions, databases, benchmark, db_ids=db_ids, present_only=present_only).examples


def read_questions(
    questions: Path,
    databases: Path,
    benchmark: str = "custom",
    *,
    db_ids: Iterable[str] = (),
    present_only: bool = False,
    number_repeats: bool = False,
) -> Loaded:
    """Read and check every question, in the file's order, and find every database it needs.

    `db_ids` keeps only the questions on these databases (empty: all). `present_only` leaves out the questions whose
    database isn't in the folder, and counts them; otherwise an absent database is an error. A question without an
    id gets `<benchmark>_<position in the file>`, which the filters don't change. An id that is given again is an error,
    or with `number_repeats` becomes `<id>#2` and so on (BIRD's mini-dev repeats some). Scalar keys beyond the known
    ones go into `meta`.

    Raises SetupError for whatever can't be used: a file or folder that is missing, JSON that is broken, a key that is
    missing or of another type, an id given twice, a database that is absent or isn't SQLite, no question left.
    """
    if not databases.is_dir():
        raise SetupError(f"database folder {databases} does not exist: give the folder with <db_id>/<db_id>.sqlite")
    records = list(read_records(questions))
    if not records:
        raise SetupError(f"{questions} holds no questions: give a JSON array or JSON lines with db_id, question, query")
    rows = [_Row(questions, where, position, value, benchmark) for position, (where, value) in enumerate(records)]
    if number_repeats:
        _number_repeats(rows)
    _check_ids(questions, rows)

    wanted = set(db_ids)
    if unknown := sorted(wanted - {row.db_id for row in rows}):
        raise SetupError(f"no question of {questions} is on database {unknown[0]}: check its spelling")
    skipped: Counter[str] = Counter()
    folder = DatabaseFolder(databases)
    examples: list[Example] = []
    for row in rows:
        if wanted and row.db_id not in wanted:
            skipped["on other databases"] += 1
            continue
        database = folder.find(row.db_id)
        if database is None:
            if not present_only:
                raise SetupError(
                    f"database {row.db_id} of question {row.question_id} is not at "
                    f"{databases / row.db_id / row.db_id}.sqlite: put it there, or restrict the databases"
                )
            skipped["on absent databases"] += 1
            continue
        examples.append(row.example(database, benchmark))
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise SetupError(f"no question of {questions} is left ({reasons}): check the databases asked for")
    return Loaded(examples, dict(skipped))


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON array or of JSON lines, each with where it stands (`entry 3`, `line 3`)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SetupError(f"question file {path} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"question file {path} is not UTF-8 (byte {error.start}): convert it") from None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SetupError(f"question file {path} is not valid JSON ({error}): mend or download it again") from None
        yield from ((f"entry {index}", value) for index, value in enumerate(values))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SetupError(
                f"question file {path}, line {number} is not valid JSON ({error}): "
                "give a JSON array of objects, or one object a line"
            ) from None


class _Row:
    """One checked entry of a question file."""

    def __init__(self, path: Path, where: str, position: int, value: Any, benchmark: str) -> None:
        self._where = f"question file {path}, {where}"
        if not isinstance(value, dict):
            raise SetupError(f"{self._where} is not a JSON object: give one with db_id, question and query")
        self.db_id = self._text(value, "db_id")
        if self.db_id in (".", "..") or any(character in self.db_id for character in "/\\\0"):
            raise SetupError(f"{self._where}: db_id {self.db_id!r} is not a plain folder name: rename it")
        self.question = self._text(value, "question")
        self.gold_sql = self._gold(value)
        self.evidence = self._optional(value, "evidence")
        self.difficulty = self._optional(value, "difficulty")
        self.question_id = self._id(value, f"{benchmark}_{position:05d}")
        self.meta = {
            key: item
            for key, item in value.items()
            if key not in _OTHER_KEYS and isinstance(item, (str, int, float, bool))
        }

    def _text(self, value: dict[str, Any], key: str) -> str:
        text = value.get(key)
        if key not in value:
            raise SetupError(f"{self._where} has no key '{key}': add it")
        if not isinstance(text, str) or not text.strip():
            raise SetupError(f"{self._where}: '{key}' must be a text that is not empty, not {text!r:.40}")
        return text

    def _optional(self, value: dict[str, Any], key: str) -> str:
        text = value.get(key)
        if text is None:
            return ""
        if not isinstance(text, str):
            raise SetupError(f"{self._where}: '{key}' must be a text, not {text!r:.40}")
        return text

    def _gold(self, value: dict[str, Any]) -> str:
        # Spider's own files have the query as `query` and its parse tree as `sql`: the first text counts.
        for key in GOLD_KEYS:
            if isinstance(value.get(key), str):
                return self._text(value, key)
        raise SetupError(f"{self._where} has no gold query: add it as 'query', 'SQL' or 'sql'")

    def _id(self, value: dict[str, Any], generated: str) -> str:
        given = value.get("question_id")
        if given is None:
            return generated
        if isinstance(given, bool) or not isinstance(given, (str, int)) or not str(given).strip():
            raise SetupError(f"{self._where}: 'question_id' must be a text or an integer, not {given!r:.40}")
        return str(given)

    def example(self, database: Database, benchmark: str) -> Example:
        return Example(
            question_id=self.question_id,
            db_id=self.db_id,
            question=self.question,
            gold_sql=self.gold_sql,
            database=database,
            evidence=self.evidence,
            difficulty=self.difficulty,
            benchmark=benchmark,
            meta=self.meta,
        )


def _number_repeats(rows: list[_Row]) -> None:
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.question_id] += 1
        if (times := seen[row.question_id]) > 1:
            row.question_id = f"{row.question_id}#{times}"


def _check_ids(path: Path, rows: list[_Row]) -> None:
    counts = Counter(row.question_id for row in rows)
    repeated = [question_id for question_id, count in counts.items() if count > 1]
    if repeated:
        shown = ", ".join(repeated[:5]) + (f" and {len(repeated) - 5} more" if len(repeated) > 5 else "")
        raise SetupError(f"question file {path} gives question_id {shown} more than once: make the ids unique")


class DatabaseFolder:
    """A folder of databases, each looked up once, so that all questions on one share a Database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Database | None] = {}
        self._subfolders = sorted(entry for entry in path.iterdir() if entry.is_dir())

    def find(self, db_id: str) -> Database | None:
        """The database of `db_id`, or None. SetupError when several could be meant, or the file isn't SQLite."""
        if db_id not in self._found:
            path = self._file(db_id)
            if path is not None:
                check_sqlite(path)
            self._found[db_id] = None if path is None else Database(db_id, path=path)
        return self._found[db_id]

    def _file(self, db_id: str) -> Path | None:
        folder = _match(db_id, self._subfolders, lambda entry: entry.name)
        if folder is None:
            return None
        for suffix in SUFFIXES:
            files = sorted(entry for entry in folder.iterdir() if entry.suffix == suffix and entry.is_file())
            if (found := _match(db_id, files, lambda entry: entry.stem)) is not None:
                return found
        return None


def _match(name: str, entries: list[Path], key: Callable[[Path], str]) -> Path | None:
    """The entry with this name; failing that, the only one that differs in case alone."""
    near = [entry for entry in entries if key(entry).casefold() == name.casefold()]
    exact = [entry for entry in near if key(entry) == name]
    if exact:
        return exact[0]
    if len(near) > 1:
        names = ", ".join(str(entry) for entry in near)
        raise SetupError(f"database {name} could be any of {names}: write db_id as the folder is spelled")
    return near[0] if near else None


def check_sqlite(path: Path) -> None:
    """SetupError when the file isn't SQLite by its first bytes, or can't be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise SetupError(f"database {path} cannot be read ({error.strerror}): check its permissions") from None
    if head != _SQLITE_MAGIC:
        raise SetupError(f"{path} is not a SQLite database (an unfinished download, or a Git LFS pointer?): replace it")
