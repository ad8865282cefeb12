"""Measures what the plans of a model need on a machine: operators, collectives, copies and the optimizer.

In the order in which data flows: what is needed (``needs``), how each kind is measured (``timing``, ``operators``,
``memory``, ``collectives``), all of it in order and within a budget (``session``), by the processes of this machine or of
torchrun (``profiling``). Leaves: a :class:`cost_models.Profile`.
"""

from autopar.profiler.profiling import profile

__all__ = ["profile"]
