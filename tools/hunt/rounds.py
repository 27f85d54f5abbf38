"""One round of the hunt: sequences side by side, beat by beat, then rest, a fresh apply beside each, and the end."""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

from devcluster.host.errors import ClusterError
from hunt.actions import Namespace
from hunt.oracles import lies
from hunt.records import (
    Body,
    Call,
    Identity,
    Life,
    Moment,
    OperatorLife,
    Record,
    children,
    conditions,
    name_of,
    parents,
    ready,
    versions,
)
from hunt.stage import Stage
from hunt.steps import Sequence as Steps
from hunt.steps import healing, wrongs

_LOOK_S: Final = 1.0
_BOUND_S: Final = 30.0
"""By then what conditions say is true, on a machine that does nothing else; a busy one has longer."""

_LONGEST_BOUND_S: Final = 150.0
_SLOWEST: Final = 3.0

_STILL_S: Final = 2.0
"""So long nothing moves where an object is Ready or refused, before it counts as at rest."""

_WAITING_STILL_S: Final = 7.0
"""The same where it waits for something that may never come."""

_QUIET_S: Final = 16.5
"""So long nobody does anything: longer than the operator goes without looking again."""

_GONE_S: Final = 45.0
_SAY_EACH_S: Final = 15.0


class Round:
    """Sequences in namespaces of their own, before one operator."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        sequences: Sequence[Steps],
        faults: tuple[str, ...],
        *,
        until: Callable[[Record], object] = lambda _: False,
    ) -> None:
        self.stage = stage
        self.operator = stage.operator(name)
        self.lives = [Life(f"hunt-{name}-{number}", each) for number, each in enumerate(sequences)]
        self.places = {life.namespace: Namespace(stage, life.namespace) for life in self.lives}
        self._faults, self._until_found = faults, until
        self._calls: list[Call] = []
        self._fresh: dict[str, Namespace] = {}
        """Namespaces without a past, by what was applied there."""

        self._fresh_of: dict[str, str] = {}
        self._known: set[str] = set()
        """Namespaces in which something was not so at a bound: nobody waits for it twice."""

        self._name, self._began_s = name, time.monotonic()
        self._said_s = self._began_s

    def run(self) -> Record:
        """Return what was seen."""
        self.operator.start()
        try:
            for life in self.lives:
                life.foreign = self.places[life.namespace].open()
            self.operator.note()
            for part, doing in ((self.drive, "steps"), (self._rest, "looks at what rests"), (self._end, "deletes all")):
                self.say(doing)
                part()
                if self._is_found():
                    break
        finally:
            record = self._record(self.operator.end())
            self._clean_up()
        return record

    def say(self, doing: str) -> None:
        """Tell now and then how far it is."""
        if (now_s := time.monotonic()) - self._said_s >= _SAY_EACH_S:
            self._said_s = now_s
            print(f"  round {self._name}, {now_s - self._began_s:.0f} s: {doing}", file=sys.stderr, flush=True)

    def _is_found(self) -> bool:
        """Whether enough was seen."""
        return bool(self._until_found(self._record(self.operator.look())))

    def _record(self, operator: OperatorLife) -> Record:
        for life in self.lives:
            life.statuses = self.stage.statuses(life.namespace)
        return Record(self.lives, operator, self._faults, self._calls)

    def drive(self) -> None:
        """Do all steps; in the end all that is still wrong is healed."""
        beats = max(len(life.sequence.steps) for life in self.lives)
        for beat in range(beats):
            self.say(f"beat {beat + 1} of {beats}")
            self._beat(beat, is_last=beat == beats - 1)
            if self._is_found():
                break

    def heal(self, life: Life) -> None:
        """Undo what is still wrong, and give a namespace without a past the same objects."""
        for step in healing(life.sequence.steps):
            self.places[life.namespace].do(step)
        if not wrongs(life.sequence.steps) & {"terminate"}:
            self._apply_afresh(life)

    def settled(self) -> dict[str, list[Body]]:
        """Return all objects when none moves any more and none says what is not so; or what there is at the bound."""
        still = _Still(self._known)
        found = self._until(still.rests, _bound_s())
        self._known |= {namespace for namespace, objects in found.items() if any(lies(tuple(objects)))}
        return found

    def _beat(self, beat: int, *, is_last: bool) -> None:
        """Do the next step of each sequence, while something goes wrong with the operator; look when all rests."""
        fault = self._faults[beat] if beat < len(self._faults) else "none"
        mark, refused = self.stage.mark(), {}
        with self.operator.disturbed(fault, number=3 + 2 * beat):
            for life in self.lives:
                if beat < len(life.sequence.steps):
                    refused[life.namespace] = self.places[life.namespace].do(life.sequence.steps[beat])
        if is_last:
            for life in self.lives:
                self.heal(life)
        seen = self.settled()
        self.operator.note()
        asked = self.stage.calls_since(mark)
        for life in self.lives:
            if beat < len(life.sequence.steps):
                step, said = life.sequence.steps[beat], refused[life.namespace]
                done = [moment.step for moment in life.moments if not moment.refused] + ([] if said else [step])
                wrong = wrongs([*done, *healing(done)] if is_last else done)
                calls = tuple(call for namespace, call in asked if namespace == life.namespace)
                objects = tuple(seen.get(life.namespace, ()))
                life.moments.append(Moment(beat, step, objects, said, wrong, calls))

    def _apply_afresh(self, life: Life) -> None:
        there = [
            {**{key: body[key] for key in ("apiVersion", "kind", "spec")}, "metadata": {"name": name_of(body)}}
            for kind in ("sdd", "sdc")
            for body in self.stage.client.objects(life.namespace, kind)
            if "deletionTimestamp" not in body["metadata"]
        ]
        written = json.dumps(there, sort_keys=True)
        if written not in self._fresh:
            place = Namespace(self.stage, f"{life.namespace}-fresh")
            self.places[place.name] = self._fresh[written] = place
            place.open()
            for body in there:
                self.stage.client.apply(place.name, body)
        self._fresh_of[life.namespace] = self._fresh[written].name

    def _rest(self) -> None:
        """Watch all stand still, once engines that never answer are believed to be silent."""
        still = _Still(self._known)
        found = self._until(lambda objects: still.rests(objects) and not _is_asked(objects), _bound_s())
        mark = self.stage.mark()
        time.sleep(_QUIET_S)
        asked, seen = self.stage.calls_since(mark), self.stage.look()
        for life in self.lives:
            life.end = tuple(found.get(life.namespace, ()))
            life.later = tuple(seen.get(life.namespace, ()))
            life.fresh = tuple(seen.get(self._fresh_of.get(life.namespace, ""), ()))
            life.calls = [call for namespace, call in asked if namespace == life.namespace]
        self._calls = [call for namespace, call in asked if not namespace]

    def _end(self) -> None:
        """Delete all that is ours, and look at what is left."""
        for place in self.places.values():
            with suppress(ClusterError):
                place.close()
        gone = self._until(_is_gone, _GONE_S)
        for life in self.lives:
            life.left = tuple(gone.get(life.namespace, ()))

    def _clean_up(self) -> None:
        for place in self.places.values():
            with suppress(ClusterError):
                place.force()

    def _until(self, condition: Callable[[list[Body]], bool], bound_s: float) -> dict[str, list[Body]]:
        end = time.monotonic() + bound_s
        while True:
            found = {name: objects for name, objects in self.stage.look().items() if name in self.places}
            # Each is asked, for each remembers what it saw.
            rests = [condition(objects) for objects in found.values()]
            if all(rests) or self.operator.has_ended or time.monotonic() > end:
                return found
            time.sleep(_LOOK_S)


class _Still:
    """Whether namespaces stand still."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._seen: dict[str, tuple[dict[Identity, str], float]] = {}

    def rests(self, objects: list[Body]) -> bool:
        """Decide it for one namespace, from one look to the next."""
        namespace, now_s = objects[0]["metadata"]["namespace"], time.monotonic()
        seen = versions(each for each in objects if not _is_leaving_pod(each))
        before, since_s = self._seen.get(namespace, ({}, now_s))
        if before != seen:
            self._seen[namespace] = (seen, now_s)
            return False
        needed_s = _STILL_S * min(_slowness(), _SLOWEST) if all(map(_is_final, parents(objects))) else _WAITING_STILL_S
        return now_s - since_s >= needed_s and (namespace in self._known or not any(lies(tuple(objects))))


def _is_asked(objects: list[Body]) -> bool:
    """Whether engines were asked too rarely yet to say that they do not answer: nothing runs in simulated pods."""
    said = [each["reason"] for parent in parents(objects) for each in conditions(parent).values()]
    return "EngineNotReady" in said and any(map(_serves, parents(objects)))


def _serves(parent: Body) -> bool:
    return ready(parent) == "True" and conditions(parent)["Ready"]["reason"] == "Serving"


def _bound_s() -> float:
    return min(_BOUND_S * _slowness(), _LONGEST_BOUND_S)


def _slowness() -> float:
    """Return how much longer everything takes on a machine that has other things to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _is_leaving_pod(body: Body) -> bool:
    """Whether a pod takes its time to end, which nobody waits for."""
    return body["kind"] == "Pod" and "deletionTimestamp" in body["metadata"]


def _is_final(parent: Body) -> bool:
    return ready(parent) == "True" or conditions(parent).get("Stalled", {}).get("status") == "True"


def _is_gone(objects: Iterable[Body]) -> bool:
    objects = list(objects)
    left = [each for each in children(objects) if each["kind"] != "PersistentVolumeClaim"]
    return not left and not parents(objects) and not parents(objects, "SpecDecodeCapture")
