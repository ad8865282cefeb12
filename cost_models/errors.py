"""The errors of this package. They are ``ValueError``s, so that a caller who does not know the package can catch them."""


class ClusterError(ValueError):
    """A description of a cluster that cannot be used: the message says the fact, the values, and what to do next."""


class ProfileError(ClusterError):
    """A profile that cannot be read, made, or used for a cluster: the message says why, and what to do next."""
