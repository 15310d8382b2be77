"""SQaLe: questions and databases joined on schema_id, read through the `sqale` package.

Both halves may be a hub repository or a local folder or file (parquet or arrow as the package reads them, or
<split>.jsonl). A database is a row payload that the sandbox builds in memory; what building it has to skip or
clamp is reported there (see shared/sql/payload.py). The package and what it needs are imported on first use.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.data.example import Example, Loaded
from shared.database import Database, Payload
from shared.errors import SetupError

QUERIES = "trl-lab/sqale2_queries"
SCHEMAS = "trl-lab/sqale2_schemas"
DIFFICULTIES = ("simple", "moderate", "hard")
ANY = "any"
_SPLITS = {"train", "test", "validation", "dev"}


class PackedPayload(Payload):
    """A payload kept compressed, because 9,000 databases of about 1 MB of JSON would not fit in memory as text.

    The two texts are unpacked each time they are asked for (some milliseconds a megabyte).
    """

    def __init__(self, full_schema: str, schema_content: str) -> None:
        # The base class is frozen and its fields are the two texts, which are properties here.
        object.__setattr__(self, "_schema", _pack(full_schema))
        object.__setattr__(self, "_content", _pack(schema_content))

    @property
    def full_schema(self) -> str:
        """DDL text."""
        return _unpack(self.__dict__["_schema"])

    @property
    def schema_content(self) -> str:
        """A JSON object: table -> list of row objects."""
        return _unpack(self.__dict__["_content"])


def _pack(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"), level=1)


def _unpack(data: bytes) -> str:
    return zlib.decompress(data).decode("utf-8", "surrogatepass")


def read_sqale(
    queries: str = QUERIES,
    schemas: str = SCHEMAS,
    *,
    split: str = "train",
    phrasing: str = "verbose",
    difficulties: Iterable[str] = (),
    limit: int | None = None,
) -> Loaded:
    """Read one split, in the order of its files; questions of one schema share one Database.

    `queries` and `schemas` are hub ids or local paths. `phrasing` is one of the package's STYLES, or "any": the first
    style with a usable phrasing. `difficulties` keeps only these levels (empty: all), `limit` the first n questions
    after that. Left out and counted: other difficulties, phrasings that are missing or placeholders, questions
    without gold SQL, questions whose schema isn't in the split. `meta` has `relevant_tables` and `phrasing`.

    Raises SetupError for a source that can't be read, an unknown phrasing or difficulty, an id given twice, a column
    that is missing, no question left.
    """
    package = _package()
    if phrasing != ANY and phrasing not in package.STYLES:
        raise SetupError(f"unknown SQaLe phrasing '{phrasing}': one of {', '.join(package.STYLES)}, {ANY}")
    styles = package.STYLES if phrasing == ANY else (phrasing,)
    levels = {level.lower() for level in difficulties}
    if unknown := sorted(levels - set(DIFFICULTIES)):
        raise SetupError(f"unknown SQaLe difficulty '{unknown[0]}': one of {', '.join(DIFFICULTIES)}")

    skipped: Counter[str] = Counter()
    kept: list[dict[str, Any]] = []
    for row in _rows(package, queries, split, ("question_id", "schema_id", "sql", "questions")):
        if limit is not None and len(kept) >= limit:
            break
        difficulty = str(row.get("difficulty") or "").lower()
        if levels and difficulty not in levels:
            skipped["of other difficulties"] += 1
            continue
        gold = row["sql"]
        if not row["question_id"] or not row["schema_id"]:
            raise SetupError(f"SQaLe data {queries} has a question without question_id or schema_id: remove it")
        if not isinstance(gold, str) or not gold.strip():
            skipped["without gold SQL"] += 1
            continue
        phrasings = package.deserialize._parse_questions(row["questions"])
        style = next((s for s in styles if package.is_usable_question(phrasings.get(s))), None)
        if style is None:
            skipped[f"without a usable phrasing ({phrasing})"] += 1
            continue
        kept.append(
            {
                "question_id": str(row["question_id"]),
                "db_id": str(row["schema_id"]),
                "question": phrasings[style],
                "gold_sql": gold,
                "difficulty": difficulty,
                "meta": {"phrasing": style, "relevant_tables": _names(row.get("relevant_tables"))},
            }
        )
    repeated, count = Counter(row["question_id"] for row in kept).most_common(1)[0] if kept else ("", 0)
    if count > 1:
        raise SetupError(f"SQaLe questions {queries} give question_id {repeated} {count} times: remove one")
    databases = _databases(package, schemas, split, {row["db_id"] for row in kept})
    examples = [
        Example(**row, database=databases[row["db_id"]], benchmark="sqale") for row in kept if row["db_id"] in databases
    ]
    if len(examples) < len(kept):
        skipped["whose schema is not in the split"] += len(kept) - len(examples)
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "the split is empty"
        raise SetupError(f"no SQaLe question of {queries} ({split}) is left: {reasons}; check split and filters")
    return Loaded(examples, dict(skipped))


def _databases(package: Any, source: str, split: str, wanted: set[str]) -> Mapping[str, Database]:
    """The wanted databases that the split has, one object each (the first row of an id counts, as in the package)."""
    found: dict[str, Database] = {}
    if not wanted:
        return found
    for row in _rows(package, source, split, ("schema_id", "full_schema", "schema_content")):
        schema_id = str(row["schema_id"])
        if schema_id in wanted and schema_id not in found:
            payload = PackedPayload(_text(row["full_schema"]), _text(row["schema_content"]))
            found[schema_id] = Database(schema_id, payload=payload)
            if len(found) == len(wanted):
                break
    return found


def _text(value: Any) -> str:
    """A payload column as text: the older releases hold some of them already decoded."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _names(value: Any) -> tuple[str, ...]:
    """The list of table names that the `relevant_tables` column spells as JSON; () when it doesn't."""
    try:
        names = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _package() -> Any:
    """The sqale package. Its row reader isn't public: the version is pinned, and checked here."""
    try:
        package = import_module("sqale")
        module = import_module("sqale.deserialize")
    except ImportError as error:
        raise SetupError(f"the package sqale cannot be imported ({error}): pip install sqale==0.2.0") from None
    for name in ("_iter_rows", "_normalise", "_parse_questions"):
        if not hasattr(module, name):
            raise SetupError(f"this version of the package sqale has no {name}: pip install sqale==0.2.0")
    return package


def _rows(package: Any, source: str, split: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows of a split under today's column names. SetupError for whatever keeps them from being read."""
    module = package.deserialize
    local = Path(source).expanduser()
    try:
        if local.is_dir():
            _check_split(local, split)
        rows = _json_lines(local, split) if _is_json_lines(local, split) else module._iter_rows(source, split)
        for number, raw in enumerate(rows, 1):
            row: dict[str, Any] = module._normalise(raw)
            if missing := [column for column in columns if column not in row]:
                raise SetupError(
                    f"SQaLe data {source}, row {number} has no column '{missing[0]}': is it the right one?"
                )
            yield row
    except (SetupError, GeneratorExit):
        raise
    except Exception as error:  # pyarrow, huggingface_hub and datasets each have their own families
        what = " ".join(str(error).split())[:200]
        remedy = "check the path" if local.exists() else "give a local folder, or a hub repository that can be reached"
        raise SetupError(f"SQaLe data {source} (split {split}) cannot be read ({what}): {remedy}") from error


def _check_split(path: Path, split: str) -> None:
    """SetupError when a folder has other splits only: the package would take their files for unsplit ones."""
    names = [file.name for suffix in ("parquet", "arrow", "jsonl") for file in path.rglob(f"*.{suffix}")]
    splits = {name.partition(".")[0].partition("-")[0] for name in names}
    if split not in splits and (others := sorted(splits & _SPLITS)):
        raise SetupError(f"SQaLe data {path} has no split '{split}': it has {', '.join(others)}")


def _is_json_lines(path: Path, split: str) -> bool:
    if path.is_file():
        return path.suffix == ".jsonl"
    return path.is_dir() and not _has_tables(path) and (path / f"{split}.jsonl").is_file()


def _has_tables(path: Path) -> bool:
    return any(next(path.rglob(f"*{suffix}"), None) for suffix in (".parquet", ".arrow"))


def _json_lines(path: Path, split: str) -> Iterator[dict[str, Any]]:
    with open(path if path.is_file() else path / f"{split}.jsonl", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
