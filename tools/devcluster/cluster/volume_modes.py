"""A daemon of a few lines: lets every user write to the volumes that a cluster provisions.

The controller manager makes a volume's directory for root alone (mode 0750), and Kubernetes
does not apply fsGroup to such volumes. Other development clusters hand out mode 0777.
Usage: python volume_modes.py DIRECTORY
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

PERIOD_S = 0.1
"""Shorter than the time between a claim's binding and the start of a pod that waited for it."""


def main(directory: Path) -> None:
    """Open new volumes to all users, for ever; a mode that a user sets later stays."""
    seen: set[str] = set()
    while True:
        present = {volume.name for volume in directory.iterdir()}
        for name in present - seen:
            with suppress(FileNotFoundError):  # deleted in the meantime
                (directory / name).chmod(0o777)
        seen = present
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
