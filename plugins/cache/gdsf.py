"""GreedyDual-Size-Frequency (Cherkasova, HP Laboratories report HPL-98-69R1, 1998) on leaves.

H = L + frequency * cost / size; the least H goes first, and L rises to the H that went. So a leaf
is worth what it saves for the memory it takes, and worth that fell behind L is forgotten.

frequency: 1 + hits. size: pages. cost: prefill work to compute the leaf's pages again at their
depth; for each token 1 + context_cost * (tokens before it), that is in units of a token without
context. L is taken at the leaf's insertion and at each hit, not when it comes on offer: a node
whose last child was evicted was not used by that.
"""

from core.config import require
from core.hookspecs import hookimpl
from core.queries import EvictorQuery
from plugins.cache.leaf_heap import LeafHeap
from plugins.cache.tree_node import TreeNode
from plugins.shared.cache_protocols import CacheNode


class Gdsf:
    """context_cost: attention's work for one token of context over a token's work in the layers'
    products. 3.3e-5 is Llama-3.1-8B: 4 * 32 layers * 4096 against 2 * 8.0e9 FLOPs."""

    def __init__(self, context_cost: float = 3.3e-5) -> None:
        require(context_cost >= 0, "context_cost", ">= 0", context_cost)
        self.context_cost = context_cost

    @hookimpl
    def build_evictor(self, query: EvictorQuery) -> "GdsfEvictor":
        """An order of its own for one cache."""
        return GdsfEvictor(query.page_size, self.context_cost)


class GdsfEvictor:
    """A heap by H. A node's memo: L at its last use."""

    remembers = True

    def __init__(self, page_size: int, context_cost: float) -> None:
        self._page_size = page_size
        self._context_cost = context_cost
        self._inflation = 0.0
        self._heap: LeafHeap[TreeNode] = LeafHeap()

    def __len__(self) -> int:
        """Nodes on offer."""
        return len(self._heap)

    def on_insert(self, node: TreeNode) -> None:
        """A new node is used now; so is the upper half of a split one."""
        node.memo = self._inflation

    def on_extend(self, node: TreeNode) -> None:
        """It is used now."""
        node.memo = self._inflation

    def on_hit(self, node: TreeNode) -> None:
        """Its worth counts from the present L again."""
        node.memo = self._inflation

    def on_lock(self, node: TreeNode) -> None:
        """Take a node off offer."""
        self._heap.withdraw(node)

    def on_unlock(self, node: TreeNode) -> None:
        """Put a node on offer at its H; O(log n)."""
        self._heap.offer(node, node.memo + (1 + node.hits) * self._cost(node))

    def pop(self) -> CacheNode:
        """Take the node of the least H and raise L to it. LookupError if none is on offer."""
        worth, node = self._heap.pop()
        self._inflation = max(self._inflation, worth)
        return node

    def _cost(self, node: TreeNode) -> float:
        """Prefill work a token, the mean over the node."""
        mean_context = (node.depth_pages - node.num_pages / 2) * self._page_size
        return 1.0 + self._context_cost * mean_context
