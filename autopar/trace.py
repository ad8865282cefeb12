"""The former place of :func:`autopar.tracing.trace`: import it from there."""

from autopar.tracing import Traced, trace

__all__ = ["Traced", "trace"]
