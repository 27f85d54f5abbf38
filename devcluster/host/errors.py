"""The one error that the development cluster shows to people."""


class ClusterError(Exception):
    """A failure that a person can act on: the text says what failed and what to do."""
