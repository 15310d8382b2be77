"""In a worker: open databases read-only, keep the clean connections, and say exactly why one can't be opened."""

import os
import sqlite3
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shared.sql import limits, payload
from shared.sql.cells import decode_text
from shared.sql.guard import Guard

_MAX_OPEN = 16
_MAX_IMAGE_BYTES = 96 << 20
_MAX_SNAPSHOT_BYTES = 64 << 20  # copied within the deadline of a call
_MAGIC = b"SQLite format 3\x00"
_WAL_VERSION = 2
# Beyond the engine's own ceilings; result size, time and memory are bounded elsewhere, per call.
_ENGINE_LIMITS = (
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 10),
)


class CannotOpen(Exception):
    """The database itself is at fault; the message is one clause that follows its name."""


class NeedPayload(Exception):
    """The parent must send the payload's texts first."""


class Opened:
    """One connection with its guard. `identity` is what the file was when it was opened."""

    def __init__(self, connection: sqlite3.Connection, guard: Guard, identity: tuple[Any, ...]) -> None:
        self.connection = connection
        self.guard = guard
        self.identity = identity
        self.lenient_text = False
        self.length = 0

    def allow_length(self, length: int) -> None:
        """Bound a string, a BLOB and a row to `length` bytes."""
        if length != self.length:
            self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)
            self.length = length

    def reverse_unordered(self) -> None:
        """Walk tables and indexes backwards where SQL leaves the order open. The connection is not kept after this."""
        self.connection.set_authorizer(None)
        self.connection.execute("PRAGMA reverse_unordered_selects = ON").close()
        self.connection.set_authorizer(self.guard.authorize)
        self.guard.plain = False

    def accept_bad_text(self) -> None:
        """From now on TEXT that is not UTF-8 arrives as RawText instead of ending the fetch."""
        self.connection.text_factory = decode_text
        self.lenient_text = True


class Databases:
    """The databases that this worker has open: at most one idle connection each, least recently used first."""

    def __init__(self, progress: Callable[[], bool], progress_steps: int) -> None:
        self._progress = progress
        self._steps = progress_steps
        self._idle: OrderedDict[str, Opened] = OrderedDict()
        self._images: OrderedDict[str, bytes] = OrderedDict()

    @contextmanager
    def connection(self, key: str, path: str | None, uri: str | None) -> Iterator[Opened]:
        """A read-only connection in its initial state, as if just opened.

        It is kept for the next call only when this one was a plain read that succeeded: then nothing
        was asked for that could have left a trace in it. Otherwise (an error, a refusal, a PRAGMA, a
        deadline) it is closed.
        """
        opened = self._idle.pop(key, None)
        identity = _identity(path)
        if opened is not None and opened.identity != identity:
            opened.connection.close()
            opened = None
        if opened is None:
            opened = self._open(key, path, uri, identity)
        keep = False
        try:
            opened.guard.reset()
            yield opened
            keep = opened.guard.plain and opened.guard.denied is None and not opened.connection.in_transaction
        finally:
            if keep:
                self._idle[key] = opened
                if len(self._idle) > _MAX_OPEN:
                    self._idle.popitem(last=False)[1].connection.close()
            else:
                opened.connection.close()

    def build(self, key: str, full_schema: str, schema_content: str, expired: Callable[[], bool]) -> list[str]:
        """Build a payload's database, keep its image, and return the notes on what was skipped."""
        data, notes = payload.build(full_schema, schema_content, expired)
        self._keep_image(key, data)
        return notes

    def held_bytes(self) -> int:
        """Memory that the built databases may take: an image, the open copy of it, and one being made."""
        sizes = [len(image) for image in self._images.values()]
        return 2 * sum(sizes) + max(sizes, default=0)

    def _keep_image(self, key: str, image: bytes) -> None:
        self._images[key] = image
        self._images.move_to_end(key)
        total = sum(len(kept) for kept in self._images.values())
        while total > _MAX_IMAGE_BYTES and len(self._images) > 1:
            old_key, old = self._images.popitem(last=False)
            total -= len(old)
            if (opened := self._idle.pop(old_key, None)) is not None:
                opened.connection.close()

    def _open(self, key: str, path: str | None, uri: str | None, identity: tuple[Any, ...]) -> Opened:
        if path is None or uri is None:
            image = self._images.get(key)
            if image is None:
                raise NeedPayload
            self._images.move_to_end(key)
            return self._from_image(image, identity)
        header = _read_header(path)
        if not header.startswith(_MAGIC):
            raise CannotOpen("the file is not a SQLite database")
        if len(header) < 100:
            raise CannotOpen("the file is cut off: it is shorter than a SQLite header")
        if header[18] == _WAL_VERSION or header[19] == _WAL_VERSION:
            return self._open_wal(path, uri, identity)
        return self._prepare(_connect(f"{uri}?mode=ro"), identity)

    def _open_wal(self, path: str, uri: str, identity: tuple[Any, ...]) -> Opened:
        """A write-ahead-log database, without leaving a -wal or -shm behind.

        No log: the main file is complete, so it is read as immutable. A log with an index file (a
        process has it open, or had): the ordinary way. A log alone: SQLite would have to create the
        index beside it, so a private copy of both files is read instead. The first and the third are
        re-made for each call: `identity` never equals itself again.
        """
        once = (*identity, object())
        if _size(f"{path}-wal") == 0:
            return self._prepare(_connect(f"{uri}?mode=ro&immutable=1"), once)
        if os.path.exists(f"{path}-shm"):
            limits.allow_file_writes(True)  # SQLite may have to grow the index file, which is shared memory
            return self._prepare(_connect(f"{uri}?mode=ro"), once)
        return self._from_image(_snapshot(path), once)

    def _from_image(self, data: bytes, identity: tuple[Any, ...]) -> Opened:
        connection = _connect("file::memory:")
        try:
            if data:
                connection.deserialize(data)
        except BaseException:
            connection.close()
            raise
        return self._prepare(connection, identity)

    def _prepare(self, connection: sqlite3.Connection, identity: tuple[Any, ...]) -> Opened:
        try:
            guard = Guard()
            _configure(connection)
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA cell_size_check = ON")
            for category, value in _ENGINE_LIMITS:
                connection.setlimit(category, value)
            connection.set_progress_handler(self._progress, self._steps)
            _connect_virtual_tables(connection)
            connection.set_authorizer(guard.authorize)
            return Opened(connection, guard, identity)
        except BaseException:
            connection.close()
            raise


def _identity(path: str | None) -> tuple[Any, ...]:
    """What must be unchanged for a kept connection to be the database still; CannotOpen when it is gone."""
    if path is None:
        return ()
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CannotOpen("the file does not exist") from None
    except OSError as error:
        raise CannotOpen(f"the file cannot be read ({error.strerror})") from None
    if stat.S_ISDIR(status.st_mode):
        raise CannotOpen("it is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise CannotOpen("it is not a regular file")
    if status.st_size == 0:
        raise CannotOpen("the file is empty (0 bytes)")
    return (status.st_dev, status.st_ino)


def _connect(uri: str) -> sqlite3.Connection:
    """Open without waiting for locks (the caller does, under its deadline) and without implicit transactions."""
    return sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, cached_statements=0)


def _configure(connection: sqlite3.Connection) -> None:
    """Where Python can (3.12): refuse writes to internal tables, and read "…" as SQLite does by default."""
    set_config = getattr(connection, "setconfig", None)
    for name in ("SQLITE_DBCONFIG_DEFENSIVE", "SQLITE_DBCONFIG_DQS_DML"):
        option = getattr(sqlite3, name, None)
        if set_config is not None and option is not None:
            with suppress(sqlite3.Error):  # an older library than Python knows
                set_config(option, True)


def _connect_virtual_tables(connection: sqlite3.Connection) -> None:
    """Let SQLite connect the database's virtual tables while only our own SQL runs.

    An R-tree prepares its INSERT and DELETE statements when it is connected, which the authorizer would refuse.
    """
    listing = "SELECT CAST(name AS BLOB) FROM sqlite_master WHERE type = 'table' AND rootpage = 0"
    for (name,) in connection.execute(listing).fetchall():
        # A module that isn't there, a name that isn't UTF-8: whoever reads the table is told.
        with suppress(sqlite3.Error, UnicodeDecodeError):
            quoted = '"' + name.decode("utf-8").replace('"', '""') + '"'
            connection.execute(f"SELECT 1 FROM {quoted} LIMIT 0").close()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _read_header(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(100)
    except OSError as error:
        raise CannotOpen(f"the file cannot be read ({error.strerror})") from None


def _snapshot(path: str) -> bytes:
    """The image of a database whose committed rows are partly in its -wal, read from a private copy."""
    import tempfile  # rarely needed, and a quarter of a worker's start

    names = [path, f"{path}-wal"]
    if sum(map(_size, names)) > _MAX_SNAPSHOT_BYTES:
        raise CannotOpen("it has a write-ahead log that was never checkpointed; run PRAGMA wal_checkpoint on it once")
    limits.allow_file_writes(True)
    try:
        with tempfile.TemporaryDirectory(prefix="execplan-") as folder:
            for name, copy in zip(names, ("copy", "copy-wal"), strict=True):
                with open(name, "rb") as source, open(os.path.join(folder, copy), "wb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
            connection = sqlite3.connect(os.path.join(folder, "copy"))
            try:
                connection.execute("PRAGMA journal_mode = DELETE")
                return connection.serialize()
            finally:
                connection.close()
    finally:
        limits.allow_file_writes(False)
