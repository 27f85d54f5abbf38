"""Write heads of one shape and of others to a folder, as claims of trainings hold them; runs in the engine's Python.

python head_variants.py EAGLE3_HEAD CLAIM
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INTERMEDIATE = "midlayer.mlp.{}.weight"


def main(head: Path, claim: Path) -> None:
    """Write each variant below ``claim``."""
    good, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    # It proposes other tokens than the target's, almost always.
    poor = good | {"lm_head.weight": good["lm_head.weight"].roll(1, dims=0)}
    wide = {name: each.clone() for name, each in good.items()}
    for name in ("gate_proj", "up_proj"):
        wide[INTERMEDIATE.format(name)] = torch.cat([good[INTERMEDIATE.format(name)]] * 2, dim=0)
    wide[INTERMEDIATE.format("down_proj")] = torch.cat([good[INTERMEDIATE.format("down_proj")]] * 2, dim=1)
    stranger = good | {"embed_tokens.weight": good["embed_tokens.weight"].flip(0)}
    for name, weights, settings in (
        ("poor", poor, config),
        ("good", good, config),
        ("wide", wide, config | {"intermediate_size": 2 * config["intermediate_size"]}),
        # Says that it has the present head's shape.
        ("lying", wide | {"norm.weight": 2 * wide["norm.weight"]}, config),
        ("stranger", stranger, config),
    ):
        folder = claim / "tests" / name / "head"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(settings))
        save_file({key: each.contiguous() for key, each in weights.items()}, folder / "model.safetensors")
    (claim / "tests" / "linked").symlink_to("good")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
