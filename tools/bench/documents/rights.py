"""Render the operator's RBAC rights as the chart's roles and as a table of the reference."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from specdecode_operator.cluster.rights import OPERATOR_RIGHTS, RELEASE, Right, Scope

TEMPLATE: Final = Path(__file__).parents[3] / "charts/specdecode-operator/templates/_rights.tpl"
_NAME: Final = '{{ include "specdecode.name" . }}'
_WIDTH: Final = 120


def rights_template() -> str:
    """Return the rules of the roles, a named template for each scope."""
    return "{{/* Generated from operator/cluster/rights.py by ./just docs */}}\n" + "\n".join(
        map("".join, map(_define, Scope))
    )


def _define(scope: Scope) -> Iterator[str]:
    yield f'{{{{- define "specdecode.rights.{scope.name.lower()}" -}}}}\n'
    for right in OPERATOR_RIGHTS:
        if right.scope is scope:
            yield _rule(right)
    yield "{{- end -}}\n"


def _rule(right: Right) -> str:
    name, slash, subresource = right.resource.partition("/")
    plural, _, group = name.partition(".")
    why = textwrap.fill(f"{right.why[0].upper()}{right.why[1:]}.", _WIDTH, initial_indent="# ", subsequent_indent="# ")
    names = f"  resourceNames: [{', '.join(right.names)}]\n".replace(RELEASE, _NAME) if right.names else ""
    groups = group or '""'
    return (
        f"{why}\n- apiGroups: [{groups}]\n  resources: [{plural}{slash}{subresource}]\n{names}"
        f"  verbs: [{', '.join(right.verbs)}]\n"
    )


def rights_table() -> str:
    """Return the table of rights, one resource per row."""
    return "| resource | verbs | scope | purpose |\n| --- | --- | --- | --- |\n" + "".join(map(_row, OPERATOR_RIGHTS))


def _row(right: Right) -> str:
    named = f", only `{'`, `'.join(right.names)}`" if right.names else ""
    return f"| `{right.resource}` | {', '.join(right.verbs)} | {right.scope}{named} | {right.why} |\n"
