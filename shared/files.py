"""Files that are whole or not there: written beside their place, flushed to the disk, and renamed."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import SetupError

_ENDING = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place when the block ends and is removed when it fails.

    The name is this process's and thread's own, so that two writers of one file do not mix; the later wins.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{_ENDING}")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def write_atomic(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Put `content` (text in UTF-8) at `path`: a reader sees the old file or the whole new one, also after a crash."""
    with replacing(path) as beside, open(beside, "wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            for piece in [content] if isinstance(content, str) else content:
                file.write(piece.encode())
        file.flush()
        os.fsync(file.fileno())


def check_output(path: Path, option: str) -> None:
    """SetupError, naming `option`, unless something may be put at `path`; folders above it may have to be made.

    For output that is written after long work: what is found here costs nothing yet.
    """
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise SetupError(f"{option} {path}: {above} is a file, not a folder; give another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SetupError(f"{option} {path}: {above} may not be written to; give another place")


def write_output(path: Path, content: str | bytes | Iterable[str], option: str) -> None:
    """`write_atomic` for a file that `option` named, folders above it made. SetupError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise SetupError(f"{option} {path} cannot be written ({error.strerror}): give another place") from error


def is_leftover(path: Path, of: str) -> bool:
    """Whether `path` is what a killed `replacing` left of a file named `of`."""
    return path.name.startswith(f".{of}.") and path.name.endswith(_ENDING)


def flush(path: Path) -> None:
    """fsync a file that is closed, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
