"""Run the trainer of speculators on a CPU, for tests: its device of rank 0 is always an accelerator otherwise."""

import os
import sys

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

if __name__ == "__main__":
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_, **__: None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(TrainConfig.resolve(sys.argv[1:]))
