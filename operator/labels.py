"""Labels and annotations that the operator puts on what it owns."""

MANAGER = "specdecode-operator"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
DEPLOYMENT_LABEL = "specdecode.io/deployment"
APPLIED_HASH_ANNOTATION = "specdecode.io/applied-hash"
TEMPLATE_HASH_ANNOTATION = "specdecode.io/template-hash"
OWNED_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER}"


def selector_labels(name: str) -> dict[str, str]:
    """Labels that single out the engine pods of one SpecDecodeDeployment."""
    return {MANAGED_BY_LABEL: MANAGER, DEPLOYMENT_LABEL: name}
