"""A pure Python suffix tree over many growing sequences; serves where the native one is not built.

Used by `suffix_index.PythonSuffixIndex` alone and kept identical in behaviour to `native/suffix_tree.hpp`.
The tree holds every substring of at most `max_depth` tokens with its number of occurrences (`count`).
Edges are compressed: a node's label is a slice of a stored sequence. Invariants: an inner node other than
the top has at least two of {children, suffixes that end there}, so counts fall strictly from parent to
child; children stand in non-increasing count; `ends` holds exactly the suffixes whose text ends at a node.

Order of equal counts (it decides which of two equally frequent continuations is drafted): a new child goes
last. A child whose count grows goes to the front of the next group of equals when it led its own group,
else to the end of it. A child whose count falls goes to the front of the next lower group. This is the
order of ArcticInference 0.3.0. Source: SuffixDecoding (arXiv 2411.04975), section 3 and its public code.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

BYTES_PER_NODE = 600
Continuation: TypeAlias = tuple[list[int], list[int], list[int]]
"""A draft: tokens, parents (-1: the match) and counts; a token's estimate D is its count over the match's."""
Place: TypeAlias = "tuple[Node, int]"
"""Where a match ends: a node and how many tokens of its label are read."""
End: TypeAlias = "tuple[StoredSequence, int]"
"""A suffix: its sequence and the index of its first token."""


class StoredSequence:
    """One sequence: its tokens and, while it grows, the nodes where its last suffixes end (longest first)."""

    __slots__ = ("active", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.active: deque[Node] = deque()


class Node:
    """A node and the edge that leads to it, labelled `sequence.tokens[start : start + length]`."""

    __slots__ = ("children", "count", "ends", "length", "order", "parent", "sequence", "start")

    def __init__(self, parent: Node | None, sequence: StoredSequence, start: int, length: int, count: int) -> None:
        self.parent = parent
        self.sequence = sequence
        self.start = start
        self.length = length
        self.count = count
        self.children: dict[int, Node] = {}
        self.order: list[Node] = []
        self.ends: dict[End, None] = {}

    @property
    def token(self) -> int:
        """First token of the label."""
        return self.sequence.tokens[self.start]


class PythonSuffixTree:
    """Counts of all substrings of at most `max_depth` tokens of a changing set of sequences."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        self._top = Node(None, StoredSequence(), 0, 0, 0)
        self._sequences: dict[int, StoredSequence] = {}

    def append(self, key: int, tokens: Sequence[int]) -> None:
        """Append tokens to sequence `key`, which is opened if it is new."""
        if len(tokens) and min(tokens) < 0:
            raise ValueError(f"token ids must not be negative: {min(tokens)}")
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = StoredSequence()
        for token in tokens:
            self._append(sequence, token)
        self.num_tokens += len(tokens)

    def close(self, key: int) -> None:
        """Say that sequence `key` will not grow any more (it keeps its place in the tree)."""
        if key in self._sequences:
            self._sequences[key].active.clear()

    def tokens(self, key: int) -> Sequence[int]:
        """The tokens of sequence `key` (empty for one that was never appended to); not to be changed."""
        sequence = self._sequences.get(key)
        return () if sequence is None else sequence.tokens

    @property
    def memory_bytes(self) -> int:
        """An estimate: the measured size of a node with its tables, times the number of nodes."""
        num_nodes = 0
        waiting = [self._top]
        while waiting:
            node = waiting.pop()
            num_nodes += 1
            waiting.extend(node.order)
        return num_nodes * BYTES_PER_NODE + 8 * self.num_tokens

    def _append(self, sequence: StoredSequence, token: int) -> None:
        active = sequence.active
        active.append(self._top)
        self._top.count += 1
        if len(active) > self.max_depth:
            active.popleft()
        first = len(sequence.tokens) + 1 - len(active)
        sequence.tokens.append(token)
        for i, node in enumerate(active):
            active[i] = self._step(node, sequence, first + i, token)

    def _step(self, node: Node, sequence: StoredSequence, suffix: int, token: int) -> Node:
        """Move the suffix that ends at `node` one token on; the node where it ends now."""
        end = len(sequence.tokens)
        child = node.children.get(token)
        if child is None:
            if node.count == 1 and node is not self._top:
                # Only this suffix comes here, so the label grows with the text.
                node.sequence, node.start = sequence, end - 1 - node.length
                node.length += 1
                return node
            child = Node(node, sequence, end - 1, 1, 1)
            node.children[token] = child
            node.order.append(child)
        elif node.count == child.count + 1 and node is not self._top:
            # Everything else that comes here goes on to `child`: no branch arises, the boundary moves.
            return self._slide(node, child, sequence, end)
        else:
            if child.length > 1:
                child = self._split(node, child, sequence, end - 1)
            _increment(node, child)
            child.sequence, child.start = sequence, end - child.length
        node.ends.pop((sequence, suffix), None)
        child.ends[(sequence, suffix)] = None
        return child

    def _slide(self, node: Node, child: Node, sequence: StoredSequence, end: int) -> Node:
        if child.length > 1:
            node.length += 1
            node.sequence, node.start = sequence, end - node.length
            del node.children[child.token]
            child.start += 1
            child.length -= 1
            node.children[child.token] = child
            return node
        parent = node.parent
        assert parent is not None
        child.count += 1
        child.length += node.length
        child.sequence, child.start = sequence, end - child.length
        child.ends.update(node.ends)
        _replace(parent, node, child)
        return child

    @staticmethod
    def _split(node: Node, child: Node, sequence: StoredSequence, start: int) -> Node:
        """Cut the first token off the label of `child` into a node of its own, which is returned."""
        upper = Node(node, sequence, start, 1, child.count)
        _replace(node, child, upper)
        child.parent = upper
        child.start += 1
        child.length -= 1
        upper.children[child.token] = child
        upper.order.append(child)
        return upper

    def remove(self, key: int) -> None:
        """Remove sequence `key` and everything that only it brought."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        self.num_tokens -= len(sequence.tokens)
        for suffix in range(len(sequence.tokens)):
            self._remove_suffix(sequence, suffix)

    def _remove_suffix(self, sequence: StoredSequence, suffix: int) -> None:
        tokens = sequence.tokens
        node = self._top
        node.count -= 1
        path: list[Node] = []
        at = suffix
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            if child.count == 1:
                del node.children[tokens[at]]
                node.order.remove(child)
                break
            _decrement(node, child)
            at += child.length
            node = child
            path.append(child)
        if node is self._top:
            return
        node.ends.pop((sequence, suffix), None)
        if len(node.order) == 1 and node.order[0].count == node.count:
            child = node.order[0]
            assert node.parent is not None
            child.start -= node.length
            child.length += node.length
            _replace(node.parent, node, child)
            path[-1] = node = child
        self._repoint(path, sequence)

    @staticmethod
    def _repoint(path: list[Node], gone: StoredSequence) -> None:
        """Let labels on `path` that read the sequence being removed read another one with the same text."""
        leaf, distance = path[-1], 0
        while leaf.order:
            leaf = leaf.order[0]
            distance += leaf.length
        depth = sum(node.length for node in path) + distance
        living = next((end for end in leaf.ends if end[0] is not gone), None)
        if living is None:
            return  # a later suffix of the same sequence comes by here again
        sequence, suffix = living
        at = suffix + depth - distance
        for node in reversed(path):
            at -= node.length
            if node.sequence is gone:
                node.sequence, node.start = sequence, at

    def matches(self, pattern: Sequence[int], key: int) -> list[Place]:
        """Where the last 1, 2, ... (fewer than all) tokens of `pattern` end, up to the first that is nowhere.

        `key`: a growing sequence whose text ends as the pattern does; its own suffixes are the matches and
        nothing is searched for those. -1: none.
        """
        places: list[Place] = []
        if key in self._sequences:
            active = self._sequences[key].active
            nodes = itertools.islice(reversed(active), max(0, len(pattern) - 1))
            places = [(node, node.length) for node in nodes]
        for length in range(len(places) + 1, len(pattern)):
            place = self._locate(pattern[len(pattern) - length :])
            if place is None:
                break
            places.append(place)
        return places

    def _locate(self, text: Sequence[int]) -> Place | None:
        node, used = self._top, 0
        for token in text:
            if used == node.length:
                child = node.children.get(token)
                if child is None:
                    return None
                node, used = child, 0
            elif node.sequence.tokens[node.start + used] != token:
                return None
            used += 1
        return node, used

    @staticmethod
    def follow_path(node: Node, used: int, budget: int, min_prob: float) -> Continuation:
        """Draft the most frequent continuation of a match (see `Continuation`)."""
        tokens: list[int] = []
        counts: list[int] = []
        matched = node.count
        while node.count / matched >= min_prob:
            taken = min(node.length - used, budget - len(tokens))
            at = node.start + used
            tokens += node.sequence.tokens[at : at + taken]
            counts += [node.count] * taken
            if len(tokens) == budget or not node.order:
                break
            node, used = node.order[0], 0
        return tokens, list(range(-1, len(tokens) - 1)), counts

    @staticmethod
    def grow_tree(node: Node, used: int, budget: int, min_prob: float) -> Continuation:
        """Draft the `budget` likeliest nodes below a match; equal estimates in order of arrival."""
        tokens: list[int] = []
        parents: list[int] = []
        counts: list[int] = []
        matched = node.count
        arrivals = 1
        heap = [(-matched, 0, node, used, -1)] if min_prob <= 1.0 else []
        while heap and len(tokens) < budget:
            _, _, node, used, parent = heappop(heap)
            if used < node.length:
                tokens.append(node.sequence.tokens[node.start + used])
                parents.append(parent)
                counts.append(node.count)
                heappush(heap, (-node.count, arrivals, node, used + 1, len(tokens) - 1))
                arrivals += 1
                continue
            for child in node.order:
                if child.count / matched < min_prob:
                    break
                heappush(heap, (-child.count, arrivals, child, 0, parent))
                arrivals += 1
        return tokens, parents, counts


def _replace(parent: Node, old: Node, new: Node) -> None:
    """Let `new`, whose label starts with the same token, take the place of `old` among its siblings."""
    parent.children[old.token] = new
    parent.order[_place(parent.order, old)] = new
    new.parent = parent


def _place(order: list[Node], node: Node) -> int:
    low = bisect_left(order, -node.count, key=_descending)
    return order.index(node, low)


def _descending(node: Node) -> int:
    return -node.count


def _increment(parent: Node, node: Node) -> None:
    """Count one occurrence more and keep the siblings in order (rule in the module docstring)."""
    order = parent.order
    low = bisect_left(order, -node.count, key=_descending)
    if order[low] is node:
        target = bisect_left(order, -(node.count + 1), key=_descending)
        at = low
    else:
        target = low
        at = order.index(node, low)
    if target != at:
        del order[at]
        order.insert(target, node)
    node.count += 1


def _decrement(parent: Node, node: Node) -> None:
    """Count one occurrence less and keep the siblings in order."""
    order = parent.order
    at = _place(order, node)
    after = bisect_right(order, -node.count, key=_descending)
    if after != at + 1:
        del order[at]
        order.insert(after - 1, node)
    node.count -= 1
