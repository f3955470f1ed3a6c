"""The parts that random programs are made of: short texts of source, read from the files in ``texts``.

    ### name: kinds odd running_buffers=*mean        "odd" parts do what ordinary models and loops do not
    the source

A block is a class, or an expression, that maps (rows, D), (rows, D, H, H) or (rows, T, D) to the same shape, as its
kinds say: v, i and t. A line's kind is the place in the loop where it stands:

    model, made, prepared       after the model is made, after the optimizer is, after run.prepare
    epoch, end                  at the beginning and the end of an epoch
    before, backward, after     before run.backward, after it, and after the step
    z                           where gradients are set to zero

What follows a line "--- after", or another place, stands there too, and what follows a line "---" outside of the
function with the loop.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Part:
    """A piece of a program."""

    name: str
    kinds: str
    """Where it fits."""
    source: str
    """The text at its place, or the definition of it."""
    odd: bool = False
    recipe: tuple = ()
    """Options of the recipe that it cannot do without: pairs of name and value."""
    top: str = ""
    """What a line needs outside of the function with the loop."""
    elsewhere: tuple = ()
    """More lines in the loop: pairs of a place and the text."""

    def at(self, place):
        """The text that a line has at a place in the loop; empty for none."""
        return "\n".join(text for here, text in ((self.kinds, self.source), *self.elsewhere) if here == place)

    @property
    def defined(self):
        """The name of the class that the source defines; empty where it defines none."""
        return found[1] if (found := re.match(r"(?:@.*\n)*class (\w+)", self.source)) else ""

    @property
    def made(self):
        """The expression that makes a block."""
        return f"{self.defined}()" if self.defined else self.source


def _read(file):
    parts = {}
    for heading, source in re.findall(r"^### (.*?)\n(.*?)(?=\n### |\Z)", (_TEXTS / file).read_text(), re.S | re.M):
        name, _, flags = heading.partition(": ")
        kinds, *flags = flags.split()
        recipe = tuple(tuple(flag.split("=")) for flag in flags if "=" in flag)
        source, _, top = source.strip("\n").partition("\n---\n")
        source, *more = re.split(r"^--- (\w+)\n", source, flags=re.M)
        elsewhere = tuple((place, text.strip("\n")) for place, text in zip(more[::2], more[1::2]))
        parts[name] = Part(name, kinds, source.strip("\n"), "odd" in flags, recipe, top, elsewhere)
    return parts


def _of_kind(parts, kind, inside=True):
    return {name: part for name, part in parts.items() if (part.kinds == kind) == inside}


_ALL_BLOCKS, _ALL_OPTIMIZERS, _ALL_LINES = (_read(f"{name}.txt") for name in ("blocks", "optimizers", "lines"))
BLOCKS, HELPERS = (_of_kind(_ALL_BLOCKS, "none", inside) for inside in (False, True))
OPTIMIZERS, OWN_OPTIMIZERS, GROUPS, SCHEDULERS, AVERAGES = (
    _of_kind(_ALL_OPTIMIZERS, kind) for kind in ("optimizer", "own", "group", "scheduler", "average")
)
LINES, ENDS = (_of_kind(_ALL_LINES, "z", inside) for inside in (False, True))
SHAPES, DATA, LOSSES = _read("shapes.txt"), _read("data.txt"), _read("losses.txt")

STEMS = {"v": "nn.Linear(6, D)", "i": "nn.Conv2d(3, D, 3, padding=1)", "t": "nn.Embedding(V, D)"}
HEADS = {
    "v": "nn.Linear(D, C)",
    "i": "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(D, C)",
    "t": "nn.LayerNorm(D), nn.Linear(D, C)",
}
INPUTS = {
    "v": "torch.randn(N, 6, generator=draw)",
    "i": "torch.randn(N, 3, H, H, generator=draw)",
    "t": "torch.randint(V, (N, T), generator=draw)",
}
TARGETS = {
    "v": "torch.randint(C, (N,), generator=draw)",
    "i": "torch.randint(C, (N,), generator=draw)",
    "t": "torch.randint(-1, C, (N, T), generator=draw)",
}
CALLS = {
    "forward": "loss_on_data, forward=lambda batch_data: trained(batch_data[0])",
    "adversarial": "loss_on_data, forward=lambda batch_data: trained['judge'](trained['maker'](batch_data[0]))",
}
"""The arguments of ``run.backward(batch, ...)`` where they are not ``loss_fn``."""
