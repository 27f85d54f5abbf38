"""A repository of objects: a bare one that tools read, and a person's clone of it."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

MAIN = "main"
_PERSON = {
    "GIT_AUTHOR_NAME": "a person",
    "GIT_AUTHOR_EMAIL": "person@example.com",
    "GIT_COMMITTER_NAME": "a person",
    "GIT_COMMITTER_EMAIL": "person@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


class Repository:
    """What a team has on its forge."""

    def __init__(self, folder: Path) -> None:
        self.bare, self._clone = folder / "gitops.git", folder / "clone"
        self._folder, self._checkouts = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._git(folder, "init", "--quiet", "--bare", f"--initial-branch={MAIN}", str(self.bare))
        self._git(folder, "clone", "--quiet", str(self.bare), str(self._clone))
        self._git(self._clone, "commit", "--quiet", "--allow-empty", "--message=nothing yet")
        self._git(self._clone, "push", "--quiet", "origin", f"HEAD:{MAIN}")

    def propose(self, branch: str, files: Mapping[str, str]) -> None:
        """Push a branch with files that are new or changed, as a pull request has it."""
        self._git(self._clone, "switch", "--quiet", "--create", branch, f"origin/{MAIN}")
        for name, text in files.items():
            path = self._clone / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._git(self._clone, "add", "--all")
        self._git(self._clone, "commit", "--quiet", f"--message={branch}")
        self._git(self._clone, "push", "--quiet", "origin", branch)

    def merge(self, branch: str) -> str:
        """Merge a pull request; return the commit."""
        self._git(self._clone, "fetch", "--quiet", "origin")
        self._git(self._clone, "switch", "--quiet", "--detach", f"origin/{MAIN}")
        self._git(self._clone, "merge", "--quiet", "--no-ff", f"--message=merge {branch}", f"origin/{branch}")
        return self._push()

    def revert(self) -> str:
        """Take the newest merge back; return the commit."""
        self._git(self._clone, "fetch", "--quiet", "origin")
        self._git(self._clone, "switch", "--quiet", "--detach", f"origin/{MAIN}")
        self._git(self._clone, "revert", "--no-edit", "--mainline=1", "HEAD")
        return self._push()

    def checkout(self, revision: str = MAIN) -> Path:
        """Return a folder with what is in a branch, as whoever is not this person gets it."""
        self._checkouts += 1
        folder = self._folder / f"checkout-{self._checkouts}"
        self._git(self._folder, "clone", "--quiet", f"--branch={revision}", str(self.bare), str(folder))
        return folder

    def _push(self) -> str:
        self._git(self._clone, "push", "--quiet", "origin", f"HEAD:{MAIN}")
        self._git(self._clone, "fetch", "--quiet", "origin")
        return self._git(self._clone, "rev-parse", "HEAD").strip()

    @staticmethod
    def _git(folder: Path, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, env=os.environ | _PERSON, capture_output=True, text=True, check=True
        ).stdout
