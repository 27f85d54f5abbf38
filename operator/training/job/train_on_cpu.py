"""Run the trainer of speculators on a CPU, for tests. By default, it always uses an accelerator."""

import os
import sys

import torch
from speculators.train import checkpointer, trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

if __name__ == "__main__":
    trainer.get_local_rank = lambda: torch.device("cpu")
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_, **__: None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(TrainConfig.resolve(sys.argv[1:]))
