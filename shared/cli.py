"""What every command-line entry point does with an error the user can mend."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.errors import SetupError

EXIT_SETUP = 2
EXIT_INTERRUPTED = 130


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
