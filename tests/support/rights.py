"""Rights in words: what a role grants, and by which of the operator's a request is allowed."""

from collections.abc import Iterable

from specdecode_operator.cluster.rights import permissions
from tests.support.objects import Body

_LISTED = frozenset(permissions())


def role_rights(rules: Iterable[Body]) -> frozenset[str]:
    """Return what the rules of a role grant, such as ``patch deployments.apps``; with a name, of that object alone."""
    return frozenset(
        f"{verb} {plural}{'.' if group else ''}{group}{slash}{subresource} {name}".rstrip()
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for plural, slash, subresource in [resource.partition("/")]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    )


def right_for(permission: str, name: str) -> str:
    """Return the right that a request takes: that of the name alone, where the operator has such a one."""
    named = f"{permission} {name}"
    return named if named in _LISTED else permission
