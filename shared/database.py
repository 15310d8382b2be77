"""A database that questions are asked about: a SQLite file, or a row payload that is built in memory."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shared.errors import SetupError


@dataclass(frozen=True)
class Payload:
    """A SQLite database as SQaLe ships it: DDL text, and a JSON object table -> list of row objects.

    Both can be megabytes, so neither shows in the repr.
    """

    full_schema: str = field(repr=False)
    schema_content: str = field(repr=False)


@dataclass(frozen=True)
class Database:
    """Exactly one of `path` (a SQLite file, never written) and `payload` is set."""

    db_id: str
    path: Path | None = None
    payload: Payload | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.payload is None):
            raise ValueError(f"database {self.db_id}: give exactly one of path and payload")

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) of the file's bytes, or of the payload's two texts. SetupError when the file can't be read."""
        digest = hashlib.sha256()
        if self.path is not None:
            try:
                with open(self.path, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except (OSError, ValueError) as error:
                raise SetupError(f"database {self.db_id} ({self.path}) cannot be read: {error}") from error
        else:
            assert self.payload is not None
            for text in (self.payload.full_schema, self.payload.schema_content):
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()
