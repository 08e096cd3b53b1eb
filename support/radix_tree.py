"""A radix tree: token sequences in which a common prefix is held once, and their order of use.

Source: Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs",
section 3 (RadixAttention).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence


class Node:
    """A run of tokens in a RadixTree: what follows its parent's."""

    def __init__(self, ids: tuple[int, ...], parent: Node | None) -> None:
        self.ids, self.parent = ids, parent
        self.children: dict[int, Node] = {}  # by their first token
        self.start: int = parent.end if parent else 0
        self.name, self.nbytes, self.used = "", 0, 0  # a Store's entry: name, bytes, time of use

    @property
    def end(self) -> int:
        """How many tokens there are from the root to the end of this run."""
        return self.start + len(self.ids)


class RadixTree:
    """Token sequences in which a common prefix is held once; it knows what was used longest ago.

    `order` holds all nodes, from the least to the most recently used. Every use() puts a path at its
    end, from the leaf up. A node therefore comes after its descendants, and the first of all is a
    leaf: the end of the sequence that was used longest ago.
    """

    def __init__(self) -> None:
        self.root = Node((), None)
        self.order: OrderedDict[Node, None] = OrderedDict()

    def match(self, ids: Sequence[int]) -> list[tuple[Node, int]]:
        """Return the nodes along ids, and how many tokens of each agree: all of them, but for the last node."""
        ids, at, path = tuple(ids), 0, []
        node = self.root.children.get(ids[0]) if ids else None
        while node is not None:
            shared = common_prefix(node.ids, ids[at : at + len(node.ids)])
            path.append((node, shared))
            at += shared
            node = node.children.get(ids[at]) if shared == len(node.ids) and at < len(ids) else None
        return path

    def insert(self, ids: Sequence[int]) -> list[Node]:
        """Add ids, as used now; return the nodes that lead to their end.

        A node in whose middle ids branch off is split: it keeps its end, and a new node takes its beginning.
        """
        path = self.match(ids)
        nodes = [node for node, _ in path]
        at = sum(shared for _, shared in path)
        if path and at < len(ids) and path[-1][1] < len(nodes[-1].ids):
            nodes[-1] = self.split(*path[-1])
        if at < len(ids):
            nodes.append(self.add(nodes[-1] if nodes else self.root, tuple(ids[at:])))
        self.use(nodes)
        return nodes

    def add(self, parent: Node, ids: tuple[int, ...]) -> Node:
        """Add a node after parent, as if it had never been used."""
        node = parent.children[ids[0]] = Node(ids, parent)
        self.order[node] = None
        self.order.move_to_end(node, last=False)
        return node

    def split(self, node: Node, n: int) -> Node:
        """Give the first n tokens of node to a new parent of it, and return that, as used now."""
        upper = self.add(node.parent, node.ids[:n])  # takes node's place among the children
        node.ids, node.start, node.parent = node.ids[n:], node.start + n, upper
        upper.children[node.ids[0]] = node
        self.use(self.path(upper))
        return upper

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the first token to the end of node."""
        nodes = []
        while node is not self.root:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def text(self, node: Node) -> tuple[int, ...]:
        """Return the tokens from the first to the end of node."""
        return tuple(i for one in self.path(node) for i in one.ids)

    def use(self, nodes: Iterable[Node]) -> None:
        """Count a path from the root as used now."""
        for node in reversed(list(nodes)):
            self.order.move_to_end(node)

    def oldest(self, excess: int, kept: Collection[Node] = ()) -> tuple[Node, int]:
        """Return the end of the sequence used longest ago, and how many of its tokens to keep if excess tokens have to
        go: less than half of them, since cutting a node's end off means writing its beginning anew.

        kept: a path from the root that isn't to be chosen.
        """
        leaf = next(node for node in self.order if node not in kept)
        return leaf, max(0, len(leaf.ids) - max(excess, (len(leaf.ids) + 1) // 2))

    def cut(self, leaf: Node, keep: int) -> Node | None:
        """Replace a leaf by a node of its first tokens, of the same age, and return that; or by nothing."""
        self.remove(leaf)
        return self.add(leaf.parent, leaf.ids[:keep]) if keep else None

    def remove(self, node: Node) -> list[Node]:
        """Take node and all that follows it out of the tree; return them."""
        node.parent.children.pop(node.ids[0])
        gone = [node]
        for one in gone:
            gone += one.children.values()
            del self.order[one]
        return gone


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
