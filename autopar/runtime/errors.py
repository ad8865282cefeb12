"""The one error that a generated program and its engine raise on purpose."""


class ProgramError(RuntimeError):
    """The program cannot do what was asked: the message says what was expected, what was given and what to do next."""
