"""Write rows of walks through a tiny target's vocabulary, as a training exports them; runs in the engine's Python.

python walk_rows.py MODEL FILE COUNT
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

LENGTH = 40
PROMPT = 8


def main(model: Path, out: Path, count: int) -> None:
    """Write so many rows; each begins at another token."""
    weights = load_file(model / "model.safetensors")
    tokens = torch.randperm(len(weights["lm_head.weight"]), generator=torch.Generator().manual_seed(3))[:count]
    following = (weights["model.embed_tokens.weight"].float() @ weights["lm_head.weight"].float().T).argmax(dim=1)
    walks = [tokens]
    for _ in range(LENGTH - 1):
        walks.append(following[walks[-1]])
    mask = [0] * PROMPT + [1] * (LENGTH - PROMPT)
    with os.fdopen(os.open(out, os.O_CREAT | os.O_WRONLY, 0o600), "w") as stream:
        stream.writelines(
            json.dumps({"input_ids": row, "loss_mask": mask}) + "\n" for row in torch.stack(walks, dim=1).tolist()
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
