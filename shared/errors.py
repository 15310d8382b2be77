"""The one error that a user is meant to read."""


class SetupError(Exception):
    """Something the user gave us (config, data, database, model folder, output folder) cannot be used.

    The message is one line that names the thing and the remedy. Command-line entry points print it
    and leave with exit code 2 (see `shared.cli`); it is never charged to a model.
    """
