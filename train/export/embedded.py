"""The importer of a program in one file: its modules come from the sources in that file, whatever is installed.

`train.export.one_file` writes this module's text, from its first import on, into such a program.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class EmbeddedModules(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Finds and loads the modules in `sources`: path below the project (`shared/chat.py`) -> text.

    A module's `__file__` is that path below `program`, the file it stands in; tracebacks show its lines.
    """

    def __init__(self, sources: Mapping[str, str], program: str) -> None:
        self._paths = {_module_name(path): path for path in sources}
        self._sources, self._program = sources, program

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, None for one that is not here."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._paths else None

    def get_filename(self, fullname: str) -> str:
        """Where the module claims to lie."""
        return f"{self._program}/{self._paths[fullname]}"

    def get_source(self, fullname: str) -> str:
        """Its text."""
        return self._sources[self._paths[fullname]]

    def is_package(self, fullname: str) -> bool:
        """Whether it is an `__init__.py`."""
        return self._paths[fullname].endswith("/__init__.py")


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def install(sources: Mapping[str, str], program: str) -> None:
    """From now on, import these modules from `program`, before any of the same name elsewhere."""
    sys.meta_path.insert(0, EmbeddedModules(sources, program))
