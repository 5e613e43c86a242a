"""Finds minimum cuts of small networks (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque

_NOTHING = 1e-15


class Network:
    """A directed network of nodes, numbered from 0. The capacities of its arcs are floats and may be infinite."""

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._room: list[float] = []  # arcs come in pairs, each beside its reverse

    def arc(self, start: int, end: int, capacity: float) -> None:
        for a, b, room in ((start, end, capacity), (end, start, 0.0)):
            self._out[a].append(len(self._to))
            self._to.append(b)
            self._room.append(room)

    def cut(self, source: int, sink: int) -> set[int]:
        """The nodes on the source's side of the minimum cut that is nearest to the source. Call it once: it uses up
        the capacities. Raises ValueError if no cut is finite."""
        while True:
            level = self._levels(source)
            if sink not in level:
                return set(level)
            at = [0] * len(self._out)
            while self._push(source, sink, level, at):
                pass

    def _levels(self, source: int) -> dict[int, int]:
        """Node -> its distance from the source in arcs that have room, for each node that can be reached."""
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for arc in self._out[node]:
                end = self._to[arc]
                if end not in level and self._room[arc] > _NOTHING:
                    level[end] = level[node] + 1
                    queue.append(end)
        return level

    def _push(self, source: int, sink: int, level: dict[int, int], at: list[int]) -> bool:
        """Send as much as fits along one more path; False where there is none. `at`: for each node, the first of its
        arcs that is not used up."""
        path: list[int] = []
        node = source
        while node != sink:
            if at[node] < len(self._out[node]):
                arc = self._out[node][at[node]]
                end = self._to[arc]
                if self._room[arc] > _NOTHING and level.get(end) == level[node] + 1:
                    path.append(arc)
                    node = end
                else:
                    at[node] += 1
            elif path:
                node = self._to[path.pop() ^ 1]
                at[node] += 1
            else:
                return False
        least = min(self._room[arc] for arc in path)
        if least == float("inf"):
            raise ValueError("no cut of this network is finite")
        for arc in path:
            self._room[arc] -= least
            self._room[arc ^ 1] += least
        return True
