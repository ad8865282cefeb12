"""Rules found and proved by running: how an operator may be split, decided on shards of an example."""

from autopar.prober.finding import ProbedRule, probe_rule
from autopar.prober.proving import prove_rule

__all__ = ["ProbedRule", "probe_rule", "prove_rule"]
