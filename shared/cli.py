"""What every command-line entry point does with an error the user can mend, and with text that others wrote."""

import argparse
import sys
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from shared.errors import SetupError

EXIT_SETUP = 2
EXIT_INTERRUPTED = 130
_KEPT = "\n\t"


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose complaints are SetupErrors: one line, like every other mistake a user can mend."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for an unknown option or a value of the wrong type."""
        raise SetupError(f"{message} (see {self.prog} --help)")


def run_main(main: Callable[[], int | None]) -> None:
    """Run `main` and exit: 0 (or what it returns), 2 with one line for a SetupError, 130 for Ctrl-C."""
    try:
        code = main()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_SETUP)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code or 0)


def plain(text: str) -> str:
    """The text without anything that a terminal obeys or that reorders what is around it; each is named instead.

    >>> plain("a\\x1b[31m\\u202eb")
    'a␛[31m<U+202E>b'
    """
    return "".join(map(_plain_character, text.encode("utf-8", "replace").decode()))


def _plain_character(c: str) -> str:
    if c in _KEPT or unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp", "Cn", "Co"):
        return c
    code = ord(c)
    return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"
