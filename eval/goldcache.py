"""Gold results on disk, so that the next run over the same data does not execute them again.

One file a gold, under the SQLite version and the database's content hash; its name covers the SQL, the limits, and
what was examined. Only what would come out the same again is kept: not a timeout or a broken limit (another
day, another load), and not a result that hangs on the clock.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.gold import Gold
from shared.data.example import Example
from shared.files import replacing
from shared.sql.cells import RawText, decode, encode
from shared.sql.sandbox import BadText, Limits, QueryResult

# Part of every key: entries of another way of examining golds are never read.
_EXAMINATION = 1
_MAX_BYTES = 8 << 20
_UNKEPT = frozenset({"gold_timeout", "gold_limit", "gold_clock"})


@dataclass(frozen=True)
class Examined:
    """A gold with its result (None when it failed) and the seconds of its first run."""

    gold: Gold
    result: QueryResult | None
    seconds: float


def default_folder() -> Path:
    """`execplan/gold` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "execplan" / "gold"


class GoldCache:
    """The entries below one folder. Never raises: what can't be read is a miss, what can't be written is not kept.

    `on_trouble` is told once, with one line, when the folder can't be written.
    """

    def __init__(self, folder: Path, on_trouble: Callable[[str], None] = lambda line: None):
        self._folder, self._on_trouble, self._writable = folder, on_trouble, True

    def path(self, example: Example, limits: Limits, audited: bool) -> Path:
        """Where the entry of a gold is, or would be."""
        key = [_EXAMINATION, example.gold_sql, asdict(limits), audited]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self._folder / f"sqlite-{sqlite3.sqlite_version}" / example.database.content_hash / f"{name}.json"

    def get(self, example: Example, limits: Limits, audited: bool) -> Examined | None:
        """The entry, or None."""
        try:
            data = decode(self.path(example, limits, audited).read_bytes())
            result = (
                QueryResult("ok", tuple(data["columns"]), list(map(tuple, data["rows"])))
                if data["rows"] is not None
                else None
            )
            return Examined(Gold.from_json(data["gold"]), result, float(data["seconds"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(self, example: Example, limits: Limits, audited: bool, examined: Examined) -> None:
        """Keep the entry if it would come out the same again."""
        if not self._writable or _UNKEPT & set(examined.gold.flags):
            return
        result = examined.result
        data = {
            "gold_sql": example.gold_sql,
            "gold": examined.gold.to_json(),
            "seconds": examined.seconds,
            "columns": None if result is None else result.columns,
            "rows": None if result is None else [list(map(_plain, row)) for row in result.rows],
        }
        body = encode(data)
        if len(body) > _MAX_BYTES:
            return
        try:
            path = self.path(example, limits, audited)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as beside:
                beside.write_bytes(body)
        except OSError as error:
            self._writable = False
            self._on_trouble(f"gold results are not cached: {self._folder} cannot be written ({error.strerror})")


def _plain(cell: Any) -> Any:
    return RawText(cell.raw) if isinstance(cell, BadText) else cell
