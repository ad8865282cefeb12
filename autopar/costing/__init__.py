"""OpGraph x strategies x CostModel -> solver.Problem: what every choice costs, and what the solver's answer means."""

from autopar.costing.answer import stage_plan
from autopar.costing.prepare import Prepared, prepare
from autopar.costing.problem import Costed, build

__all__ = ["Costed", "Prepared", "build", "prepare", "stage_plan"]
