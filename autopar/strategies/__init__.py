"""How operators may be split: what a rule is, the rules of all operator families, and the choices that follow.

In the order of the data: ``rule.py`` (letters and signatures), ``signatures.py`` and a file per family, ``registry.py`` (all
rules, and the user's), ``cuts.py`` (where letters may be cut), ``choices.py`` (the strategies on a mesh).
"""

from autopar.strategies.registry import register_rule, registered_targets, signature_of

__all__ = ["register_rule", "registered_targets", "signature_of"]
