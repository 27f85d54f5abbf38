"""How one SpecDecodeDeployment is named."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """Namespace and name of one SpecDecodeDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Namespace and name, as kubectl users write them."""
        return f"{self.namespace}/{self.name}"
