"""How installed CRDs go together with this version."""

from typing import Final

from specdecode_operator.api.base import VERSION_LABEL, Body
from specdecode_operator.version import __version__, is_newer

INSTALL_CRD: Final = "specdecode crds | kubectl apply --server-side -f -"


def crd_skew(body: Body) -> str | None:
    """Say how an installed CRD and this version go together; None where they are of one version."""
    name, said = body["metadata"]["name"], (body["metadata"].get("labels") or {}).get(VERSION_LABEL)
    if said == __version__:
        return None
    if said and is_newer(said, __version__):
        return f"{name} is of {said}, newer than this {__version__}, which knows none of the fields that came since"
    older = f"is of {said}" if said else "does not say its version"
    return f"{name} {older}, older than this {__version__}: the API server drops fields that it lacks"
