"""Who waits for whom, in a whole job: a graph of what its workers say they wait for, and the cycles in it. Pure.

A wait has one or more targets. Of most all must do something (a receive waits for its sender, a gather for all that have not answered); of
a call of a channel one is enough (a get waits for any producer). A wait whose bytes are on their way waits for nobody.

A **circle** is a set of workers each of which waits, over others of the set, for itself. A wait for one of several counts only if all of
them are in the set: otherwise one outside may help. Whoever does something else meanwhile may help himself out, so a circle is what is
worth looking at, not a proof; one in which every wait is seconds old, and nobody's loop is busy, will not end by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Circle", "Wait", "find_circles"]


_STARTS = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """One operation of a worker that waits.

    Attributes:
        worker: who waits.
        targets: for whom; empty: for anyone.
        any_of: one of them is enough.
        text: the operation, for people.
        age_s: since it was begun; None if nobody knows.
        site: ``file:line`` where it was begun; empty as above.
    """

    worker: str
    targets: tuple[str, ...]
    any_of: bool = False
    text: str = ""
    age_s: float | None = None
    site: str = ""


@dataclass(frozen=True, slots=True)
class Circle:
    """See the module.

    Attributes:
        workers: all in it, in order.
        path: one way around: each waits for the next, and the last for the first.
        waits: for each of `path`, the wait in question, the oldest if there are several.
    """

    workers: tuple[str, ...]
    path: tuple[str, ...]
    waits: tuple[Wait, ...]

    def __str__(self) -> str:
        return " -> ".join((*self.path, self.path[0]))


def find_circles(waits: Iterable[Wait]) -> list[Circle]:
    """All circles, in order of their workers; no worker is in two of them."""
    left = [wait for wait in waits if wait.targets]
    while True:
        components = _components(left)
        kept = [wait for wait in left if _stays(wait, components)]
        if len(kept) == len(left):
            break
        left = kept
    inside: dict[int, list[Wait]] = {}
    for wait in left:
        inside.setdefault(components[wait.worker], []).append(wait)
    return sorted((_circle(own) for own in inside.values()), key=lambda circle: circle.workers)


def _stays(wait: Wait, components: Mapping[str, int]) -> bool:
    """Whether it may hold up a circle: it leads back to its worker, and if it waits for one of several, all of them do."""
    own = components[wait.worker]
    back = [components[target] == own for target in wait.targets]
    return all(back) if wait.any_of else any(back)


def _circle(waits: Sequence[Wait]) -> Circle:
    """The shortest way around that leads over one of the first workers."""
    best: tuple[str, ...] = ()
    workers = sorted({wait.worker for wait in waits})
    edges = _edges(waits, set(workers))
    for worker in workers[:_STARTS]:
        path = _way_back(worker, edges)
        if path and (not best or len(path) < len(best)):
            best = path
    of: dict[str, list[Wait]] = {}
    for wait in waits:
        of.setdefault(wait.worker, []).append(wait)
    chosen = [
        max((wait for wait in of[worker] if target in wait.targets), key=lambda wait: wait.age_s or 0.0)
        for worker, target in zip(best, (*best[1:], best[0]), strict=True)
    ]
    return Circle(tuple(workers), best, tuple(chosen))


def _edges(waits: Iterable[Wait], inside: set[str]) -> dict[str, list[str]]:
    edges: dict[str, dict[str, None]] = {}
    for wait in waits:
        edges.setdefault(wait.worker, {}).update(dict.fromkeys(target for target in wait.targets if target in inside))
    return {worker: list(targets) for worker, targets in edges.items()}


def _way_back(start: str, edges: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The shortest way from a worker to itself; empty if there is none."""
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        worker = queue.popleft()
        for target in edges.get(worker, ()):
            if target == start:
                path = [worker]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return tuple(reversed(path))
            if target not in came_from:
                came_from[target] = worker
                queue.append(target)
    return ()


def _components(waits: Iterable[Wait]) -> dict[str, int]:
    """Tarjan's strongly connected components, without recursion: by worker, a number that those of one component share."""
    edges: dict[str, list[str]] = {}
    for wait in waits:
        edges.setdefault(wait.worker, []).extend(wait.targets)
        for target in wait.targets:
            edges.setdefault(target, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    for root in edges:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        path = [(root, iter(edges[root]))]
        while path:
            worker, targets = path[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    path.append((target, iter(edges[target])))
                    break
                if target not in component:
                    low[worker] = min(low[worker], index[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[worker])
                if low[worker] == index[worker]:
                    while True:
                        member = stack.pop()
                        component[member] = index[worker]
                        if member == worker:
                            break
    return component
