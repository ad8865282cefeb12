"""Errors for users: each states a fact, the values, and what to do next.

Everything that autopar raises on purpose is an :class:`AutoparError`; failed ``assert`` statements are faults of ours.
"""


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class InputError(AutoparError, ValueError):
    """An argument, file or option is wrong."""


class TraceError(AutoparError):
    """The model cannot be traced: its forward depends on data, or uses something that torch.export refuses."""


class RuleError(AutoparError, ValueError):
    """A sharding rule does not fit the operator it was given for."""


class ProgramError(AutoparError, RuntimeError):
    """A parallel program cannot do what was asked of it: a batch of another size, a checkpoint of another model."""


class InfeasibleError(AutoparError):
    """No plan fits the devices' memory, or the forced choices contradict each other."""


class PlanFileError(InputError):
    """A plan file is damaged, of another schema version, or made for another model or cluster."""
