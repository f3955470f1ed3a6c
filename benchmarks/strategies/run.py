"""Time per step and peak memory per rank of every strategy, against ``single`` and torch's own use of the same.

``python benchmarks/strategies/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import Rounds, alternate  # noqa: E402
from harness.commands import Launcher, lockstep_run, torchrun  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

CLAIM = (
    "The aim: with K = W, a step under ddp, fsdp and pipeline takes at most 1.05x of torch's own DDP, FSDP2 and "
    "pipelining, and the memory of a rank falls with W under fsdp and pipeline. The column 'ratio to torch's own' says "
    "where it is met."
)
PLAIN = {"ddp": "plain_ddp.py", "fsdp": "plain_fsdp.py", "pipeline": "plain_pipeline.py"}
"""torch's own use of a strategy."""
STRATEGIES = ("ddp", "fsdp", "pipeline", "tensor", "parameter_server")
MESHES = {4: ("data=2,pipeline=2", "data=2,tensor=2")}


def main() -> None:
    given = read_command_line()
    sections = []
    for processes in given.processes:
        commands, ranks = sides(processes, given.strategies)
        peaks: dict[str, float] = {}
        measured = alternate(commands, ranks, alternations=given.alternations, seconds=given.seconds, peaks=peaks)
        sections.append(section(processes, measured, peaks))
        print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="All strategies: time per step and memory per rank",
            claim=CLAIM,
            sections=[*sections, report.LEGEND, NOTES],
        )


NOTES = (
    "The model is a decoder of 6 blocks (4.9 million parameters), 16 sequences of 32 tokens a step in W micro-batches, "
    "SGD with momentum, one thread a process. Memory is the peak beyond what the process held before the model was "
    "built. With more processes than cores, strategies in which all ranks compute at once share the cores."
)


def read_command_line() -> argparse.Namespace:
    parser = options.parser_of_alternations(8)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    return options.read(parser)


def sides(processes: int, strategies: list[str]) -> tuple[dict[str, Command], dict[str, int]]:
    """The command of each side and its number of ranks; K is the number of processes for all."""
    k = ["--micro-batches", str(processes)]
    commands: dict[str, Command] = {
        "single": partial(side, lockstep_run, 1, "with_lockstep.py", [*k, "--strategy", "single"])
    }
    ranks = {"single": 1}
    for strategy in strategies:
        commands[strategy] = partial(side, lockstep_run, processes, "with_lockstep.py", [*k, "--strategy", strategy])
        ranks[strategy] = processes
        if strategy in PLAIN:
            name = f"plain {strategy}"
            commands[name] = partial(side, torchrun, processes, PLAIN[strategy], k)
            ranks[name] = processes
    for mesh in MESHES.get(processes, ()):
        if mesh.split(",")[1].partition("=")[0] in strategies:
            arguments = [*k, "--strategy", "hybrid", "--mesh", mesh]
            commands[f"hybrid {mesh}"] = partial(side, lockstep_run, processes, "with_lockstep.py", arguments)
            ranks[f"hybrid {mesh}"] = processes
    return commands, ranks


def side(start: Launcher, processes: int, script: str, arguments: list[str], control: Path) -> list[str]:
    """The command line of one side, once its control socket is known."""
    return start(processes, HERE / "sides" / script, "--workload", "transformer", *arguments, "--control", str(control))


def section(processes: int, measured: Rounds, peaks: dict[str, float]) -> str:
    """The table of one number of processes."""
    rows = []
    for name, times in measured.items():
        plain = measured.get(f"plain {name}")
        rows.append(
            [
                name,
                Spread(tuple(times)).text(1),
                ratios(times, measured["single"]).text(),
                ratios(times, plain).text() if plain else "",
                f"{peaks[name] / 2**20:.0f} MiB",
            ]
        )
    head = ["side", "ms per step", "ratio to single", "ratio to torch's own", "peak memory of a rank"]
    runs = len(measured["single"])
    return f"## {processes} processes, K = {processes}, {runs} alternations\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    main()
