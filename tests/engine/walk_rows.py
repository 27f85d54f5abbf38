"""Write a tiny target's own greedy answers to random prompts, as a training exports them; runs in the engine's Python.

python walk_rows.py MODEL FILE COUNT
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

PROMPT, ANSWER = 6, 34
FIRST_TOKEN = 2  # after those that begin and end a text
BATCH = 100


def main(model: Path, out: Path, count: int) -> None:
    """Write so many rows."""
    torch.set_num_threads(1)
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    chance = torch.Generator().manual_seed(3)
    prompts = torch.randint(FIRST_TOKEN, target.config.vocab_size, (count, PROMPT), generator=chance)
    mask = [0] * PROMPT + [1] * ANSWER
    with os.fdopen(os.open(out, os.O_CREAT | os.O_WRONLY, 0o600), "w") as stream:
        for batch in prompts.split(BATCH):
            rows = target.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                do_sample=False,
                pad_token_id=0,
            )
            stream.writelines(json.dumps({"input_ids": row, "loss_mask": mask}) + "\n" for row in rows.tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
