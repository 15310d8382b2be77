"""A run folder: run.json (what the run is), episodes.jsonl (one line an episode), summary.json (when finished).

`run.json` is written before the first episode and never again; a run goes on only if its identity is
the same. `episodes.jsonl` only grows while the run lasts, one flushed line at a time, so a kill loses at
most the line that was being written; at the end it is put into question order. `timing.jsonl` holds what
differs between two identical runs (seconds), so that the other files can be compared byte by byte.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from shared.errors import SetupError
from shared.files import check_output, is_leftover, write_atomic

RUN, EPISODES, TIMING, SUMMARY = "run.json", "episodes.jsonl", "timing.jsonl", "summary.json"

Key = tuple[str, int]


def episode_key(record: Mapping[str, Any]) -> Key:
    """What an episode is of: (question_id, sample number)."""
    return str(record["question_id"]), int(record.get("sample", 0))


def to_line(record: Mapping[str, Any]) -> str:
    """One JSON line. ASCII, because a model can write text that has no UTF-8 form."""
    return json.dumps(record, separators=(",", ":"), sort_keys=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run. SetupError when it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"{path} does not exist: {path.parent} is no finished run of eval.run") from None
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}): run the evaluation again") from None
    if not isinstance(data, dict):
        raise SetupError(f"{path} is not a JSON object: run the evaluation again")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """`write_atomic` of an indented JSON object."""
    write_atomic(path, json.dumps(data, indent=2) + "\n")


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """All whole lines of an episodes file, the first of each episode, in the file's order.

    A last line without its end (a killed write) is dropped; any other damaged line is a SetupError.
    """
    if not path.is_file():
        return []
    records: dict[Key, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            records.setdefault(episode_key(record), record)
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{path}:{number} is damaged ({error!r}): remove the line and run again") from None
    return list(records.values())


class RunFolder:
    """The folder of one run while it is being written."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        """Nothing is written yet. SetupError when the folder is in use by anything but this run, unfinished."""
        self.path = folder
        self._identity = dict(identity)
        self._open: list[TextIO] = []
        self.resumed = self._check()

    def _check(self) -> bool:
        folder = self.path
        check_output(folder, "output")
        if folder.exists() and not folder.is_dir():
            raise SetupError(f"output {folder} is a file: give a folder that does not exist yet")
        if not folder.exists() or all(self._is_start(path) for path in folder.iterdir()):
            return False
        if not (folder / RUN).is_file():
            raise SetupError(f"output folder {folder} is in use and holds no run: give another one")
        if (folder / SUMMARY).exists():
            raise SetupError(f"output folder {folder} is in use by a finished run: give another one, or delete it")
        known = read_json(folder / RUN)["identity"]
        if known != json.loads(json.dumps(self._identity)):
            keys = [key for key in {**known, **self._identity} if known.get(key) != self._identity.get(key)]
            raise SetupError(
                f"output folder {folder} is in use by an unfinished run that differs in {', '.join(sorted(keys))}: "
                "give another one, or the same settings to resume it"
            )
        return True

    def _is_start(self, path: Path) -> bool:
        """True for what a run leaves that was killed before its run.json was there."""
        started = path.name in (EPISODES, TIMING) and path.stat().st_size == 0 and not (self.path / RUN).exists()
        return is_leftover(path, RUN) or started

    def done(self) -> list[dict[str, Any]]:
        """The episodes that are on disk."""
        return read_episodes(self.path / EPISODES)

    def open(self, about: Mapping[str, Any]) -> None:
        """Create the folder or take it up again. `about` is written beside the identity, and not compared."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (EPISODES, TIMING):
            self._open.append(open(self.path / name, "a", encoding="ascii"))  # noqa: SIM115 (closed in close)
        try:
            fcntl.flock(self._open[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"output folder {self.path} is being written by another process: wait for it") from None
        if not self.resumed:
            write_json(self.path / RUN, {"identity": self._identity, **about})
        for name in (EPISODES, TIMING):
            _cut_unfinished_line(self.path / name)

    def append(self, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Add one finished episode. On disk (as far as this process is concerned) when it returns."""
        for file, line in zip(reversed(self._open), (timing, record), strict=True):
            file.write(to_line(line))
            file.flush()

    def finish(self, records: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
        """Put the episodes into the order given and write the summary: the run is finished."""
        self.close()
        write_atomic(self.path / EPISODES, map(to_line, records))
        write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Close the files; the run can be resumed."""
        for file in self._open:
            file.close()


def _cut_unfinished_line(path: Path) -> None:
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
