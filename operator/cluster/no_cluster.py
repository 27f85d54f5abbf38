"""Messages of commands that reach no cluster, the same through kubectl and through the Kubernetes client."""

import os
from pathlib import Path


def no_kubeconfig(kubeconfig: str | None, problem: str = "names no cluster") -> str:
    """Return the message for a kubeconfig that cannot be used; ``kubeconfig`` is the value of --kubeconfig."""
    source = "--kubeconfig" if kubeconfig else "KUBECONFIG"
    problem = problem if kubeconfig_exists(kubeconfig) else "no such file"
    return f"{source}: {kubeconfig_path(kubeconfig)}: {problem}: set --kubeconfig or KUBECONFIG to another file"


def unknown_context(context: str, kubeconfig: str | None) -> str:
    """Return the message for a context that the kubeconfig does not define."""
    if not kubeconfig_exists(kubeconfig):
        return no_kubeconfig(kubeconfig)
    return f"--context: {context}: no such context in the kubeconfig: list them with kubectl config get-contexts"


def unreachable(server: str, cause: str) -> str:
    """Return the message for an API server that does not answer."""
    address = f" at {server.removeprefix('https://')}" if server else ""
    return (
        f"cannot reach the API server{address} ({cause}): check that the cluster is up, and --context and --kubeconfig"
    )


def kubeconfig_path(kubeconfig: str | None) -> str:
    """Return the path or paths of the kubeconfig, in the order of precedence of kubectl."""
    return kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"


def kubeconfig_exists(kubeconfig: str | None) -> bool:
    """Return whether any file of the kubeconfig exists."""
    return any(Path(each).expanduser().exists() for each in kubeconfig_path(kubeconfig).split(os.pathsep) if each)
