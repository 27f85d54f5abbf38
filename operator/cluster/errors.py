"""Errors of the cluster, in words for `kubectl describe`."""


class ClusterError(Exception):
    """A call to Kubernetes failed; worth another try later.

    Messages land on objects that users read, so they never hold payloads,
    tokens or whole responses.
    """


class NotFoundError(ClusterError):
    """The object, or its kind, does not exist (any more)."""


class ConflictError(ClusterError):
    """Somebody else changed the object in between."""


class ForbiddenError(ClusterError):
    """The operator lacks a permission; the message names it."""


class DeniedError(ForbiddenError):
    """An admission policy denies a request that the operator may make; ``words`` are the policy's."""

    def __init__(self, message: str, words: str) -> None:
        super().__init__(message)
        self.words = words


class UntriableError(ClusterError):
    """Something in the API server's way does not support dry runs, so nothing can be tried there."""


class InvalidObjectError(ClusterError):
    """The API server refuses the object as it is; another try will not help."""


class RefusedForNowError(ClusterError):
    """Refused for a quota, or a namespace that is being deleted: it may pass without a change of the object."""


class NotLeadingError(ClusterError):
    """Without the Lease by which it may write, this replica does not."""
