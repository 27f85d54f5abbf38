"""Where a pair could run: one split of it over the GPUs of nodes of one kind."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.choice.node_placement import place_phrase
from specdecode_operator.sizing.memory.budget import Budget, Verdict
from specdecode_operator.sizing.pair.pair import TENSOR_ONLY, Parallelism
from specdecode_operator.vocabulary import Precision

PRODUCT_FIELD: Final = "accelerator.product"
"""Where users say which GPUs may be used."""


@dataclass(frozen=True)
class Row:
    """One candidate."""

    product: str  # GPU product, or CPU
    tensor: int  # GPUs that share each layer
    budget: Budget  # Memory of each GPU
    # What target and draft are served at; None where no model drafts
    target_precision: Precision
    draft_precision: Precision | None
    spread: Parallelism = TENSOR_ONLY  # How it is spread beyond that
    nodes: int = 1  # Over how many nodes its GPUs lie

    @property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return self.budget.verdict

    @property
    def served(self) -> tuple[Precision, Precision | None, int | None]:
        """Precisions of target and draft, and to how many requests at once the default is lowered; None: not at all."""
        return self.target_precision, self.draft_precision, self.budget.fewer_seqs

    @property
    def split(self) -> Parallelism:
        """Over which GPUs a replica is spread."""
        return self.spread.at(self.tensor)

    @property
    def gpus(self) -> int:
        """GPUs that a replica takes."""
        return self.tensor * self.spread.groups

    @property
    def gpus_per_node(self) -> int:
        """GPUs that it takes of each node."""
        return self.gpus // self.nodes

    @property
    def place(self) -> str:
        """Where it lies, in words."""
        return place_phrase(self.gpus, self.nodes, self.product)
