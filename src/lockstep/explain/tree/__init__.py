"""How micro-batches fold into the fixed summation tree."""

from lockstep.explain.tree.drawing import tree_svg
from lockstep.explain.tree.facts import Branch, Holder, Tree, explain_tree
from lockstep.explain.tree.terminal import tree_text

__all__ = ["Branch", "Holder", "Tree", "explain_tree", "tree_svg", "tree_text"]
