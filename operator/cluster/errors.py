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


class InvalidObjectError(ClusterError):
    """The API server refuses the object as it is; another try will not help."""


class RefusedForNowError(ClusterError):
    """Refused for a quota, or a namespace that is being deleted: it may pass without a change of the object."""


class NotLeadingError(ClusterError):
    """Without the Lease by which it may write, this replica does not."""
