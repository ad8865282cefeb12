"""Plan + OpGraph -> source of one readable program. ``generate`` writes it, ``ledger`` counts what it sends."""

from autopar.codegen.ledger import Entry, ledger
from autopar.codegen.program import generate

__all__ = ["Entry", "generate", "ledger"]
