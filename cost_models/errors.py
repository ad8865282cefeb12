"""The error of this package. It is a ``ValueError``, so that a caller who does not know the package can catch it."""


class ClusterError(ValueError):
    """A description of a cluster that cannot be used: the message says the fact, the values, and what to do next."""
