"""Which defaults change, for the operator writes every setting out."""

from typing import Final

from specdecode_operator.api.deployment import Engine, Serving
from specdecode_operator.engine.profiles import find_profile
from specdecode_operator.engine.settings import Platform
from specdecode_operator.estimate.estimate import engine_defaults
from specdecode_operator.migration.builder import Outcome, SpecBuilder
from specdecode_operator.sizing.base.devices import find_device

_UNSAID: Final = "not said"


def note_defaults(builder: SpecBuilder, platform: Platform) -> None:
    """Say of each setting that the Deployment left to the engine what the engine took, where that changes."""
    version = builder.get("engine.version") or Engine().version
    products = builder.get("accelerator.product") or [""]
    engine = engine_defaults(version, find_device(products[0]))
    ours = Serving()
    profile = find_profile(version)
    compared = {
        "maxNumSeqs": (engine.max_num_seqs, ours.max_num_seqs),
        "maxNumBatchedTokens": (engine.max_num_batched_tokens, ours.max_num_batched_tokens),
        "memoryUtilizationPercent": (engine.utilization_percent, ours.memory_utilization_percent),
        "blockSize": (engine.block_size, profile.default_block_sizes[platform]),
    }
    if platform is Platform.CPU:
        # Other defaults hold there, and the share of memory has no meaning.
        compared = {}
    for field, (theirs, written) in compared.items():
        path = f"serving.{field}"
        if builder.get(path) is None and theirs != written:
            where = f"on {products[0]}" if products[0] else "on GPUs of 70 GiB and more"
            result = f"{written}; vLLM {version} takes {theirs} {where}: set the field to keep that"
            builder.note(Outcome.DEFAULT, f"spec.{path} ({_UNSAID})", result)
