"""A pair on its way from a pull request to engines, and what gets no further: each step as a person sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.conditions import condition
from tests.support.gitops.action import Job, example_inputs, run_action
from tests.support.gitops.health import told
from tests.support.gitops.repository import Repository
from tests.support.gitops.sync import Tool
from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.waiting import DEADLINE_S, eventually


@dataclass(frozen=True)
class Drill:
    """A repository, the tool that syncs it into a namespace, and the one pair of it that is looked at."""

    kubectl: Kubectl
    repository: Repository
    tool: Tool
    pair: str
    serve: Callable[[], object] = lambda: None
    """Has the engines that there are serve, where they do not by themselves."""
    deadline_s: float = DEADLINE_S
    """For engines to serve."""

    def propose(self, branch: str, files: Mapping[str, str]) -> Job:
        """Open a pull request; return what its checks say."""
        self.repository.propose(branch, files)
        return run_action(self.repository.checkout(branch), **example_inputs())

    def merge(self, branch: str) -> str:
        """Merge it and sync; return what was refused."""
        self.repository.merge(branch)
        return self.tool.sync(self.repository.checkout())

    def revert(self) -> str:
        """Take the newest merge back and sync; return what was refused."""
        self.repository.revert()
        return self.tool.sync(self.repository.checkout())

    def roll_out(self, branch: str) -> Body:
        """Merge it, and watch all tools wait until its engines serve; return the object then."""
        before = self._generation()
        assert self.merge(branch) == ""
        assert self._generation() == before + 1, "it is a change, and one only"
        eventually(lambda: told(self.body) == "wait", "all tools wait")
        self.be_healthy()
        self.be_in_sync()
        return self.body

    def be_healthy(self) -> None:
        """Wait until its engines serve and all tools say so."""

        def look() -> bool:
            self.serve()
            word = told(self.body)
            assert word == "good", (word, condition(self.kubectl, self.pair, "Ready"))
            return True

        eventually(look, "all tools say that it is healthy", self.deadline_s)

    def be_in_sync(self) -> None:
        """See that another sync finds nothing to do."""
        checkout = self.repository.checkout()
        before = self._generation()

        def is_same() -> bool:
            assert (found := self.tool.differences(checkout)) == "", found
            return True

        # A status that is written between the two looks of a comparison is a difference, too.
        eventually(is_same, "there is no difference")
        assert self.tool.sync(checkout) == ""
        assert self._generation() == before

    @property
    def body(self) -> Body:
        """The object as it is stored."""
        return self.kubectl.object("sdd", self.pair)

    @property
    def engines(self) -> dict[str, str]:
        """Names of its pods, with what tells one from its successor and how often it was started again."""
        found = self.kubectl.objects("pods", f"--selector=specdecode.io/deployment={self.pair}")
        return {each["metadata"]["name"]: _life(each) for each in found if "deletionTimestamp" not in each["metadata"]}

    def repairs(self) -> list[str]:
        """Return what Events tell of changes by others that were undone."""
        return [each["message"] for each in self.kubectl.objects("events") if each["reason"] == "DriftRepaired"]

    def _generation(self) -> int:
        found = {each["metadata"]["name"]: each["metadata"]["generation"] for each in self.kubectl.objects("sdd")}
        return int(found.get(self.pair, 0))


def _life(pod: Body) -> str:
    restarts = [each["restartCount"] for each in pod["status"].get("containerStatuses", [])]
    return f"{pod['metadata']['uid']} {restarts}"
