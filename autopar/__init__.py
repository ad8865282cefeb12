"""Automatic parallelization of PyTorch training: a model and a cluster -> the best plan, its proof, and a program.

    plan = autopar.plan(model, cluster, example_inputs=batch)               # nothing is run
    parallel = autopar.parallelize(model, cluster, example_inputs=batch)    # under torchrun

Public names load on first use (PEP 562), so that a generated program, which imports only :mod:`autopar.runtime`, loads
neither planner nor solver. A submodule must not have a public name's name: importing it would replace the name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autopar.errors import AutoparError, InfeasibleError, InputError, PlanFileError, RuleError, TraceError
    from autopar.options import Parallelism, PlanOptions
    from autopar.parallel import parallelize
    from autopar.planner import plan
    from autopar.plans import Plan
    from autopar.prober import probe_rule, prove_rule
    from autopar.profiler import profile
    from autopar.runtime.errors import ProgramError
    from autopar.strategies import register_rule
    from autopar.tracing import trace
    from autopar.verifier import verify
    from cost_models import Cluster, ClusterError, Profile, ProfileError

__all__ = [
    "AutoparError",
    "Cluster",
    "ClusterError",
    "InfeasibleError",
    "InputError",
    "Parallelism",
    "Plan",
    "PlanFileError",
    "PlanOptions",
    "Profile",
    "ProfileError",
    "ProgramError",
    "RuleError",
    "TraceError",
    "__version__",
    "parallelize",
    "plan",
    "profile",
    "probe_rule",
    "prove_rule",
    "register_rule",
    "trace",
    "verify",
]

_HOMES = {
    "autopar.errors": ("AutoparError", "InfeasibleError", "InputError", "PlanFileError", "RuleError", "TraceError"),
    "autopar.options": ("Parallelism", "PlanOptions"),
    "autopar.parallel": ("parallelize",),
    "autopar.planner": ("plan",),
    "autopar.plans": ("Plan",),
    "autopar.prober": ("probe_rule", "prove_rule"),
    "autopar.profiler": ("profile",),
    "autopar.runtime.errors": ("ProgramError",),
    "autopar.strategies": ("register_rule",),
    "autopar.tracing": ("trace",),
    "autopar.verifier": ("verify",),
    "cost_models": ("Cluster", "ClusterError", "Profile", "ProfileError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
