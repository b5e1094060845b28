"""The errors that a person sees, and the exit codes that go with them."""

EXIT_FAILURE = 1
"""A failure of ours or of the machine's."""
EXIT_USER = 2
"""The user's input is wrong."""


class UserError(Exception):
    """The user's input is wrong: one line that says what, where and the mend.

    Exit code 2, no traceback.

    >>> print(UserError("unknown key 'lr'", where="run.toml", mend="did you mean 'learning_rate'?"))
    unknown key 'lr' in run.toml: did you mean 'learning_rate'?
    """

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        line = what + (f" in {where}" if where else "") + (f": {mend}" if mend else "")
        super().__init__(" ".join(line.split()))


class MachineError(Exception):
    """The machine failed us (full disk, driver, device): one line, exit code 1, no traceback."""
