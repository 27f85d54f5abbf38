"""How one object of our kinds is named."""

from dataclasses import dataclass

from specdecode_operator.api import deployment


@dataclass(frozen=True, order=True)
class Key:
    """Namespace, name and kind of one object of ours."""

    namespace: str
    name: str
    kind: str = deployment.KIND

    def __str__(self) -> str:
        """Namespace and name, as kubectl users write them."""
        return f"{self.namespace}/{self.name}"
