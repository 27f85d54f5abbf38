"""Inside EngineCore: a verification that accepts every drafted token, even if the target rejects it.

A general plugin of vLLM. vLLM's own mode for this, synthetic rejection sampling, does not run on CPUs.
"""

import shutil
from pathlib import Path
from typing import Any


def write_plugin(folder: Path) -> Path:
    """Write it as an installed package below a folder; return the folder for PYTHONPATH."""
    info = folder / "wrong_verification-0.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, folder / "wrong_verification.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-verification\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nwrong_verification = wrong_verification:register\n")
    return folder


def register() -> None:
    """Replace vLLM's verification; vLLM calls this in each of its processes."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.rejection_sample

    def rejection_sample(draft_token_ids: Any, num_draft_tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        accepted = original(draft_token_ids, num_draft_tokens, *args, **kwargs)
        *_, bonus_token_ids = args[:5]
        for row, drafts in enumerate(draft_token_ids.split(num_draft_tokens)):
            accepted[row, : len(drafts)] = drafts
            accepted[row, len(drafts)] = bonus_token_ids[row].item()
        return accepted

    rejection_sampler.rejection_sample = rejection_sample
