"""The checks of the proof kit: each part gives (name, what is expected, a function that finds out)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu import cifar, tasks
from tests.simcuda.layouts import LAYOUTS, LEVEL_B
from tests.simcuda.machine import ROOT
from tests.simcuda.trainings import saving

from lockstep.config.strategy_options import devices_per_process

if TYPE_CHECKING:
    from tests.gpu.kit import Check, Kit

_BACK_SECONDS, _BACK_BYTES = 5.0, 64 << 20
_TOO_LATE = ("ended with exit code -6", "timed out", "timeout")
"""The words of NCCL's watchdog on a rank that spins, in the rank that waits for it."""
DEEP = {
    "pipeline 4": (4, "pipeline", {}),
    "pipeline 4, gpipe": (4, "pipeline", {"pipeline": {"schedule": "gpipe"}}),
}
"""Layouts of part b alone, for models with enough layers."""


_UNFIT = {**dict.fromkeys(LEVEL_B, ("lstm", "resnet18")), **dict.fromkeys(DEEP, ("lstm",))}
"""Models that a layout cannot split."""
FIRST = ("single", "ddp 2", "fsdp 2", "pipeline 2")
"""Layouts that part b begins with."""


class Skip(Exception):
    """A check does not apply here, with the reason."""


_NOT_SIMULATED = "not on simulated devices"


def _has_compiler() -> bool:
    return any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def _require_compiler(kit: Kit) -> None:
    """Raises ``Skip`` where torch.compile cannot be shown."""
    if kit.simulated:
        raise Skip(_NOT_SIMULATED)
    if not _has_compiler():
        raise Skip("torch.compile needs a C compiler, such as gcc")


def count_cards(world: Any) -> int:
    """The number of CUDA devices."""
    import torch

    return torch.cuda.device_count()


def _verdict(met: bool) -> str:
    return "met" if met else "not met"


def _environment(kit: Kit, ranks: int) -> dict[str, str]:
    """Variables with which so many ranks, or replicas of one, share the cards."""
    places = ",".join(str(number * kit.cards // ranks) for number in range(ranks))
    return {"LOCKSTEP_DEVICES": places} if ranks > kit.cards else {}


def _train(kit: Kit, layout: str, model: str, seconds: float = 240.0, **options: Any) -> list[Any]:
    ranks, strategy, own = {**LAYOUTS, **DEEP}[layout]
    devices = int(layout.split()[1].rstrip(",")) if strategy in ("dp", "layers") else ranks
    devices *= devices_per_process(own.get("mesh", ""))
    shared = _environment(kit, devices)
    return kit.machine.run(tasks.train_with, ranks, shared, model, strategy, {**own, **options}, timeout=seconds)


def describe(kit: Kit) -> None:
    """Notes versions, the driver and the cards, whichever parts follow."""
    kit.about |= kit.machine.run(tasks.versions, 1)[0]
    if kit.simulated or not shutil.which("nvidia-smi"):
        return
    asked = "--query-gpu=name,driver_version,memory.total,mig.mode.current,compute_mode,clocks.max.sm,power.limit"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
    except subprocess.TimeoutExpired as error:
        kit.about["nvidia-smi"] = str(error)
        return
    kit.about["nvidia-smi"] = (answer.stdout or answer.stderr).strip().replace("\n", " | ")


def what_is_there(kit: Kit) -> Iterator[Check]:
    """Part a."""

    def versions() -> tuple[str, str]:
        return "; ".join(f"{name} {value}" for name, value in kit.about.items()), "measured"

    def triton() -> tuple[str, str]:
        if kit.simulated:
            raise Skip(_NOT_SIMULATED)
        try:
            (differ,) = kit.machine.run(tasks.kernel_sums, 1, timeout=120.0)
        except ImportError as error:
            raise Skip(f"no Triton: {error}") from None
        return f"not equal: {', '.join(differ)}" if differ else "equal", _verdict(not differ)

    yield "versions", "", versions
    for ranks in (1, 2, 3, 4):

        def connect(ranks: int = ranks) -> tuple[str, str]:
            sums = kit.machine.run(tasks.connect, ranks, _environment(kit, ranks), timeout=90.0)
            return str(sums), _verdict(sums == [float(sum(range(ranks)))] * ranks)

        yield f"NCCL, {ranks} ranks on {min(ranks, kit.cards)} cards", "sum of the ranks", connect
    yield "Triton: sums of the fused kernel, one card", "equal bits", triton
    yield "lockstep doctor", "no fault", partial(_doctor, kit)
    yield "lockstep train digits, on 1, 2", "one fingerprint", partial(_launched, kit)
    for layout in LAYOUTS:
        yield f"trains: {layout}", "finite losses", partial(_trains, kit, layout)


def _command(kit: Kit, folder: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """A command of Lockstep, as a user calls it, in a folder."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "NCCL_IB_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=kit.seconds_left(seconds),
    )


def _devices(kit: Kit, ranks: int) -> str:
    """``--devices`` for so many ranks, which share cards where there are fewer; processes of the CPU if simulated."""
    if kit.simulated:
        return f"cpu:{ranks}"
    return _environment(kit, ranks).get("LOCKSTEP_DEVICES", str(ranks))


def _doctor(kit: Kit) -> tuple[str, str]:
    """The command's findings on this machine, and between two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        done = _command(kit, folder, "doctor", "--json", "--devices", _devices(kit, 2), seconds=90)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    faults = [f"{each['subject']}: {each['found']}" for each in lines if each["grade"] == "fault"]
    found = next((each["found"] for each in lines if each["subject"] == "all-reduce"), done.stderr[-200:])
    return "; ".join([found, *faults]), _verdict(done.returncode == 0 and not faults)


def _launched(kit: Kit) -> tuple[str, str]:
    """The job that comes with Lockstep, through its command and launcher."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            command = ["train", "digits", "--devices", _devices(kit, ranks), "--set", "training.epochs=1"]
            done = _command(kit, folder, *command, "--set", "training.portable=false", seconds=120)
            words = next((line for line in done.stdout.splitlines() if line.startswith("fingerprint")), "")
            if done.returncode or not words:
                raise RuntimeError((done.stdout + done.stderr)[-2000:])
            found.append(words.split()[1])
    return found[0][:12] if len(set(found)) == 1 else " and ".join(found), _verdict(len(set(found)) == 1)


def _trains(kit: Kit, layout: str) -> tuple[str, str]:
    losses = _train(kit, layout, "perceptron", seconds=100.0)[0].losses  # other layouts are next if it hangs
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}", _verdict(all(0 < each < 10 for each in losses))


def bits(kit: Kit) -> Iterator[Check]:
    """Part b."""
    models = ("convolutions", "decoder", "lstm") if kit.simulated else ("resnet18", "decoder", "lstm")
    precisions = ("fp32", "fp16") if kit.simulated else ("fp32", "bf16", "tf32", "fp16")
    known: dict[tuple[str, str, bool], Any] = {}

    def reference(model: str, precision: str, compiled: bool) -> Any:
        recipe = model, precision, compiled
        if recipe not in known:
            known[recipe] = _train(kit, "single", model, precision=precision, compile=compiled)[0]
        return known[recipe]

    def same(layout: str, model: str, precision: str, compiled: bool = False) -> tuple[str, str]:
        if compiled:
            _require_compiler(kit)
        expected = reference(model, precision, compiled)
        found = _train(kit, layout, model, precision=precision, compile=compiled)
        if layout in LEVEL_B:
            worst = max(abs(a / b - 1) for a, b in zip(found[0].losses, expected.losses))
            return f"losses within {worst:.1e}", _verdict(worst < 0.02)
        equal = all(each.fingerprint == expected.fingerprint for each in found)
        norms = all(str(each.norms) == str(expected.norms) for each in found)  # NaN where fp16 overflows
        words = "equal" if equal else f"{found[0].fingerprint[:12]}, not {expected.fingerprint[:12]}"
        return f"{words}; clip norms {'equal' if norms else 'not equal'}", _verdict(equal and norms)

    done: set[str] = set()

    def cases(
        layouts: Sequence[str],
        models: Sequence[str] = models,
        precisions: Sequence[str] = precisions,
        compiled: bool = False,
    ) -> Iterator[Check]:
        for precision in precisions:
            for model in models:
                for layout in layouts:
                    recipe = f"{model}, {precision}{', compiled' if compiled else ''}"
                    name = f"{recipe}: {'again' if layout == 'single' else layout}"
                    unfit = model in _UNFIT.get(layout, ())
                    if name in done or unfit:
                        continue
                    done.add(name)
                    expected = "losses within 2 %" if layout in LEVEL_B else "one fingerprint"
                    yield name, expected, partial(same, layout, model, precision, compiled)

    def resume() -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            whole, parts = f"{folder}/whole", f"{folder}/parts"
            ((expected, _),) = kit.machine.run(saving, 1, "single", {}, 8, whole, "")
            found = ""
            for steps, (ranks, strategy) in zip(
                (2, 4, 6, 8), [(2, "ddp"), (2, "fsdp"), (2, "pipeline"), (1, "single")]
            ):
                shared = _environment(kit, ranks)
                arguments = (strategy, {}, steps, parts, "auto")
                ((found, _), *_) = kit.machine.run(tasks.saving_with, ranks, shared, *arguments, timeout=240.0)
        return found[:12], _verdict(found == expected)

    def on_the_gpu() -> tuple[str, str]:
        found = set(kit.machine.run(tasks.fed_with, 1, {}, "single", "host"))
        for place in ("device", "made there"):
            for ranks, strategy in ((1, "single"), (2, "ddp")):
                found |= set(kit.machine.run(tasks.fed_with, ranks, _environment(kit, ranks), strategy, place))
        return f"{len(found)} found", _verdict(len(found) == 1)

    def together() -> tuple[str, str]:
        ((same, seen),) = kit.machine.run(tasks.gradients_together, 1)
        words = f"{'equal' if same else 'other'} bits, NaN and infinities {'seen' if seen else 'missed'}"
        return words, _verdict(same and seen)

    yield "gradients divided together", "the bits of a CPU; NaN is seen", together
    # What a short time on a card shows first: every model, then every layout, then every precision.
    others = [each for each in (*LAYOUTS, *DEEP) if each not in (*FIRST, "fsdp 3", "ddp 3", "pipeline 3")]
    yield from cases(FIRST, precisions=precisions[:2])
    fused = () if kit.simulated else ("gru",)  # simulated devices have no fused cell for it
    further = ("stacked", *fused, "encoder")
    yield from cases(FIRST[:3], models=further, precisions=precisions[:2])
    yield "samples on the GPU: single, ddp 2", "one fingerprint", on_the_gpu
    yield "resume: ddp 2, fsdp 2, pipeline 2, single", "one fingerprint", resume
    yield from cases(others, models=("decoder",), precisions=("fp32",))
    for model, precision in (("decoder", "fp32"), (models[0], "bf16")):
        yield from cases((*FIRST, "dp 2", "ddp 4"), (model,), (precision,), compiled=True)
    yield from cases(FIRST)
    yield from cases(others)


def speed(kit: Kit) -> Iterator[Check]:
    """Part c."""

    def against_plain(model: str, batch: int, compiled: str, k: int) -> tuple[str, str]:
        if kit.simulated and model == "resnet50":
            raise Skip(_NOT_SIMULATED)
        if compiled:
            _require_compiler(kit)
        times = kit.machine.run(tasks.step_times, 1, model, batch, k, compiled, timeout=400.0)[0]
        own, plain, deterministic = times
        ratio = own / plain
        words = f"{own * 1e3:.2f} ms against {plain * 1e3:.2f} ms, ratio {ratio:.3f}"
        words += f"; deterministic too {own / deterministic:.3f}"
        if model == "resnet50" and not tasks.workers_for(model):
            words += "; /dev/shm is too small for loader processes, so that both loops wait for their data"
        return words, "measured" if kit.simulated or k > 1 else _verdict(ratio <= 1.02)

    def compared(model: str, batch: int, compiled: str, k: int) -> Check:
        name = f"{model}, batch {batch}, K = {k}{f', {compiled} compiled' if compiled else ''}"
        expected = "at most 1.02 of plain" if k == 1 else ""
        return name, expected, partial(against_plain, model, batch, compiled, k)

    def fold() -> tuple[str, str]:
        numbers = 1 << 12 if kit.simulated else 1 << 25
        return f"{kit.machine.run(tasks.fold_speed, 1, numbers)[0]:.1f} GB/s", "measured"

    def idle(model: str, batch: int) -> tuple[str, str]:
        if kit.simulated:
            raise Skip("no profiler on simulated devices")
        plain, own = kit.machine.run(tasks.idle_shares, 1, model, batch, timeout=400.0)[0]
        return f"{own:.1%} of the time, a plain loop {plain:.1%}", "measured"

    def photos() -> tuple[str, str]:
        workers = 2 if kit.simulated else min(16, os.cpu_count() or 1)
        count, copies, batch, seconds = (64, 2, 16, 2.0) if kit.simulated else (1024, 16, 256, 15.0)
        arguments = (count, copies, batch, workers, seconds)
        rate, size = kit.machine.run(tasks.photo_rate, 1, *arguments, timeout=300.0)[0]
        return f"{rate:.0f} photos/s, {workers} workers, {size >> 10} kB a file", "measured"

    refused: list[str] = []
    yield compared("resnet50", 256, "", 1)
    yield compared("resnet50", 256, "blocks", 1)
    yield compared("resnet50", 256, "whole", 1)
    yield compared("perceptron", 512, "", 1)
    yield "fold of 8 gradients of 128 MB", "", fold
    for ranks in sorted({2, max(2, min(8, kit.cards))}):
        yield f"sums of gradients, {ranks} ranks", "equal bits", partial(_sums, kit, ranks, refused)
    yield "ddp 2, sums in one kernel", "one fingerprint", partial(_trains_fused, kit, refused)
    for model, batch in (("resnet50", 256), ("perceptron", 512)):
        yield f"device idle: {model}, batch {batch}", "", partial(idle, model, batch)
    yield "photos read, 500 x 375", "", photos
    yield compared("perceptron", 512, "", 4)
    yield compared("resnet50", 256, "", 4)
    yield compared("resnet50", 256, "blocks", 4)


def _fused_environment(kit: Kit, ranks: int) -> dict[str, str]:
    """Turns on the fused kernel; on one card the ranks' symmetric memory lies side by side."""
    shared = _environment(kit, ranks)
    overlap = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if shared else {}
    return {**shared, **overlap, "LOCKSTEP_FUSED_REDUCTION": "1"}


def _sums(kit: Kit, ranks: int, refused: list[str]) -> tuple[str, str]:
    """Bytes per second of a rank, by collectives and by the fused kernel; notes why that one is not taken."""
    numbers = 1 << 14 if kit.simulated else 1 << 23
    found = kit.machine.run(tasks.sum_speeds, ranks, _fused_environment(kit, ranks), numbers, timeout=240.0)
    collectives, fused, _, said = found[0]
    if fused is None:
        refused.append(f"no fused kernel: {said.rpartition('kernel: ')[2]}")
        return f"collectives {collectives:.1f} GB/s; {refused[-1]}", "measured"
    words = f"collectives {collectives:.1f} GB/s, one kernel {fused:.1f} GB/s"
    return words, _verdict(all(equal for _, _, equal, _ in found))


def _trains_fused(kit: Kit, refused: list[str]) -> tuple[str, str]:
    if refused:
        raise Skip(refused[0])
    (expected,) = _train(kit, "single", "resnet18")
    found = kit.machine.run(tasks.train_with, 2, _fused_environment(kit, 2), "resnet18", "ddp", {}, timeout=240.0)
    equal = all(each.fingerprint == expected.fingerprint for each in found)
    return "equal" if equal else "not equal", _verdict(equal)


def cifar10(kit: Kit) -> Iterator[Check]:
    """Part g."""
    accuracies: dict[str, float] = {}

    def by_recipe(name: str) -> tuple[str, str]:
        if kit.cifar10 is None and not kit.simulated:
            raise Skip(_NO_CIFAR10)
        sizes = (
            ("", 32, 2, 4, False)
            if kit.simulated
            else (str(kit.cifar10), cifar.BATCH, cifar.EPOCHS, 64, _has_compiler())
        )
        workers = (0 if kit.simulated else min(8, os.cpu_count() or 1),)
        body, more = (cifar.plain, ()) if name == "plain" else (cifar.lockstep, workers)
        (found,) = kit.machine.run(body, 1, *sizes, *more, timeout=400.0)
        accuracies[name] = found.accuracies[-1]
        reached = found.reached(0.94)
        words = f"{accuracies[name]:.2%} in {found.seconds[-1]:.1f} s (epoch 1: {found.seconds[0]:.1f} s)"
        words += f", 94 % after {reached:.1f} s" if reached else ""
        if name == "plain" or kit.simulated or "plain" not in accuracies:
            return words, "measured"
        return words, _verdict(accuracies[name] >= accuracies["plain"] - 0.005)

    yield "CIFAR-10, recipe, plain loop", "", partial(by_recipe, "plain")
    yield "CIFAR-10, recipe, Lockstep", "as accurate within 0.5 %", partial(by_recipe, "lockstep")
    yield "CIFAR-10, job cifar10 in bf16", "at least 94 %", partial(_cifar10_job, kit)


_NO_CIFAR10 = "give its archive or folder: --cifar10 PATH"


def _cifar10_job(kit: Kit) -> tuple[str, str]:
    """Trains the job on the data that was given to the kit."""
    if kit.cifar10 is None:
        raise Skip(_NO_CIFAR10)
    if kit.simulated:
        raise Skip(_NOT_SIMULATED)
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "cifar10", "--data", str(kit.cifar10.resolve()), "--precision", "bf16"]
        compiled = str(_has_compiler()).lower()
        command += ["--devices", "1", "--set", f"training.compile={compiled}"]
        done = _command(kit, folder, *command, "--set", "training.micro_batches=1", seconds=400.0)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        (log,) = Path(folder).glob("runs/*/log.jsonl")
        epochs = [each for each in map(json.loads, log.read_text().splitlines()) if each["kind"] == "epoch"]
    best = max(each["validation_accuracy"] for each in epochs)
    reached = [each["seconds"] for each in epochs if each["validation_accuracy"] >= 0.94]
    words = f"; 94 % after {reached[0]:.0f} s of {epochs[-1]['seconds']:.0f} s" if reached else ""
    return f"{best:.2%}{words}", _verdict(best >= 0.94)


def waits_and_races(kit: Kit) -> Iterator[Check]:
    """Part d."""

    def waits(layout: str) -> tuple[str, str]:
        if kit.simulated:
            found = _train(kit, layout, "convolutions")
            count = sum(sum(each.waits.values()) for each in found)
            if count:
                return f"{count} waits", "not met"
        ranks, strategy, own = LAYOUTS[layout]
        shared = _environment(kit, max(ranks, own.get(strategy, {}).get("replicas", 1)))
        finds = all(kit.machine.run(tasks.without_waits, ranks, shared, strategy, own, timeout=240.0))
        return "no wait raised" if finds else "a wait that was made on purpose did not raise", _verdict(finds)

    def finds_a_race() -> tuple[str, str]:
        (finds,) = kit.machine.run(tasks.finds_a_race, 1)
        return "raised" if finds else "not raised: the rows below show nothing", _verdict(finds)

    def races(layout: str) -> tuple[str, str]:
        ranks, strategy, own = LAYOUTS[layout]
        shared = _environment(kit, ranks)
        # Raises where torch's sanitizer does
        found = kit.machine.run(tasks.sanitized, ranks, shared, "convolutions", strategy, own, timeout=300.0)
        return f"the sanitizer raised nothing; {sum(map(len, found))} races", _verdict(not any(found))

    for layout in ("single", "dp 2", "ddp 2", "fsdp 2", "pipeline 2", "parameter_server 3"):
        yield f"set_sync_debug_mode: {layout}", "0 waits in a step", partial(waits, layout)

    def workers() -> tuple[str, str]:
        (inline,), (read,) = (kit.machine.run(tasks.read_by_workers, 1, each, timeout=240.0) for each in (0, 3))
        return ("equal" if read == inline else "not equal"), _verdict(read == inline)

    yield "batches of loader workers, and of none", "0 waits, one fingerprint", workers
    yield "sanitizer: a race that was made on purpose", "raised", finds_a_race
    for layout in ("single", "ddp 2", "fsdp 2"):
        yield f"sanitizer: {layout}", "0 races", partial(races, layout)


def faults(kit: Kit) -> Iterator[Check]:
    """Part e."""

    def used() -> int:
        return int(kit.machine.run(tasks.used_memory, 1)[0])

    def ends(how: str, ranks: int, *words: str) -> tuple[str, str]:
        if kit.simulated and how in ("spins", "asserts"):
            raise Skip(_NOT_SIMULATED)
        before, said = used(), "nothing was raised"
        try:
            kit.machine.run(tasks.fails, ranks, _environment(kit, ranks), how, timeout=130.0)
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", []))
            said = f"{type(error).__name__}: {error} {notes}"
        more = _not_given_back(used, before)
        back = f"{said[:60]}; {more >> 20} MB not given back"
        return back, _verdict(any(each in said for each in words) and more <= _BACK_BYTES)

    yield (
        "kill -9 in a collective",
        "named; memory back",
        partial(ends, "killed", 2, "ended with exit code -9"),
    )
    yield "kill -9 of a rank of lockstep run", "rank named; memory back", partial(_killed, kit, used)
    yield "out of memory", "named; memory back", partial(ends, "fills", 1, "out of memory")
    yield "an assert on the device", "named; memory back", partial(ends, "asserts", 1, "CUDA error")
    # 30 s until NCCL's watchdog sees it, and as much as a minute until that has written down what it knows
    yield "a rank that spins in a kernel", "named; memory back", partial(ends, "spins", 2, *_TOO_LATE)


def _not_given_back(used: Callable[[], int], before: int) -> int:
    """Bytes of device memory that are in use beside those of before, after some seconds at most."""
    began = time.monotonic()
    while (more := used() - before) > _BACK_BYTES and time.monotonic() - began < _BACK_SECONDS:
        pass  # each look starts a process
    return max(more, 0)


_KILLED = """
import os, signal, torch, lockstep
run = lockstep.init(global_batch=16, micro_batches=8, seed=1)
model, optimizer = run.prepare(m := torch.nn.Linear(512, 512), torch.optim.SGD(m.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.rand(48, 512), torch.arange(48) % 3)
for _ in run.epochs(100_000):
    for batch in run.batches(data):
        if batch.plan.step == 20 and run.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(batch, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
"""


def _killed(kit: Kit, used: Callable[[], int]) -> tuple[str, str]:
    """A rank is killed while the other one waits for it: the launcher names it, and ends the run."""
    before, began = used(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(_KILLED)
        done = _command(kit, folder, "run", "--devices", _devices(kit, 2), "script.py", seconds=90)
        seconds = time.monotonic() - began
    more = _not_given_back(used, before)
    words = re.compile(r"rank 1\b.*killed by SIGKILL")
    named = next((line for line in done.stderr.splitlines() if words.search(line)), "")
    met = done.returncode != 0 and bool(named) and more <= _BACK_BYTES
    named = named or done.stderr.strip().replace("\n", " | ")
    return f"{named[:60]}; {seconds:.0f} s; {more >> 20} MB not given back", _verdict(met)


def memory(kit: Kit) -> Iterator[Check]:
    """Part f."""
    model = "convolutions" if kit.simulated else "resnet18"

    def given_back(layout: str) -> tuple[str, str]:
        ranks, strategy, own = LAYOUTS[layout]
        arguments = (model, strategy, own)
        left = kit.machine.run(tasks.left_memory, ranks, _environment(kit, ranks), *arguments, timeout=240.0)
        allowed = 0 if kit.simulated else _BACK_BYTES
        return f"{max(left) / 2**20:.1f} MB", _verdict(max(left) <= allowed)

    def of_a_step(layout: str) -> tuple[str, str]:
        one, found = _train(kit, "single", model)[0], _train(kit, layout, model)[0]
        return f"{found.peak / 2**20:.1f} MB, single {one.peak / 2**20:.1f} MB", "measured"

    for layout in ("single", "ddp 2", "fsdp 2", "pipeline 2"):
        yield f"memory after a run: {layout}", "at most 64 MB", partial(given_back, layout)
    for layout in ("ddp 2", "fsdp 2", "pipeline 2"):
        yield f"peak of steps: {layout}", "", partial(of_a_step, layout)
