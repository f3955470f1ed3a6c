"""Audits a run: recomputes some of the intervals between its checkpoints and compares them with what it recorded.

checkpoints    0 ...... 12 ...... 24 ...... 36      0 is the start, computed from the seed
intervals      |---1---|----2----|----3----|
checked                |----2----|                  chosen by a public seed

An interval is trained again on one device, from the checkpoint at its beginning. In each step the data, the loss and
the gradient must have the recorded bits. At its end the state must be that of the next checkpoint: parameters, buffers,
optimizers, schedulers and loss scale.
"""

from __future__ import annotations

import hashlib
import logging
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.record import canonical, encode
from lockstep.core.fingerprint import digest_tensors
from lockstep.core.values import differing
from lockstep.data.batch import Batch
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.job.run_folder import read_starts, recipe_digest
from lockstep.replay import find_origin, require_context, trainer_at
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.text import labelled, plural, shorten
from lockstep.trainer import Trainer
from lockstep.trainer.audit_record import FILE, Chain, digest_batch, digest_file, read_chain
from lockstep.trainer.gradient_record import GradientDigest, digest_gradients
from lockstep.trainer.trainer import AVERAGE, WEIGHTS

logger = logging.getLogger(__name__)
_MOST_NAMES = 5


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The steps from one recorded state to the next."""

    first: int
    """The first step; its state is that of a checkpoint, or of the start."""
    end: int
    """The step before which the interval ends."""
    checkpoint: Path | None
    """The checkpoint of the state at the end; None where the run ended without one."""

    def __str__(self) -> str:
        last = self.end - 1
        return f"step {last}" if last == self.first else f"steps {self.first} to {last}"


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A place where the run is not what it claims to be."""

    where: str
    """As in ``step 17``."""
    what: str
    """A sentence: what differs."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The result of an audit."""

    folder: Path
    chain: Chain
    intervals: Sequence[Interval]
    """All of the run."""
    checked: Sequence[Interval]
    """Those that were recomputed, in order."""
    seed: int
    findings: Sequence[AuditFinding]
    """Empty where all that was checked has the recorded bits."""
    context: Mapping[str, Any]
    """The conditions under which the run was trained."""
    layouts: Sequence[str]
    """As in ``fsdp on 4``, of each start of the run."""


def intervals(folder: Path, chain: Chain) -> list[Interval]:
    """The intervals of a run between the checkpoints that are left, in order.

    Raises:
        ConfigError: the run has made no step.
    """
    first = read_starts(folder)[0].step
    kept = {entry["step"]: folder / str(entry["name"]) for entry in chain.last("checkpoint").values()}
    kept = {step: path for step, path in kept.items() if step > first and path.is_dir()}
    last = max(chain.last("step"), default=first - 1) + 1
    if last <= first:
        raise ConfigError(f"The run in '{folder}' has made no step yet. Audit it when it has.")
    ends = sorted({step for step in kept if step <= last} | {last})
    return [Interval(first=begin, end=end, checkpoint=kept.get(end)) for begin, end in pairwise([first, *ends])]


def choose(among: Sequence[Interval], seed: int, count: int) -> list[Interval]:
    """``count`` of the intervals, in order: those with the smallest SHA-256 of ``SEED FIRST``; 0: all of them."""

    def rank(interval: Interval) -> str:
        return hashlib.sha256(f"{seed} {interval.first}".encode()).hexdigest()

    chosen = sorted(among, key=rank)[: count or None]
    return sorted(chosen, key=lambda interval: interval.first)


def chance(intervals: int, checked: int, wrong: int = 1) -> float:
    """The probability that at least one of ``wrong`` intervals is among the checked ones."""
    if wrong > intervals - checked:
        return 1.0
    return 1.0 - math.comb(intervals - wrong, checked) / math.comb(intervals, checked)


def audit(
    folder: Path,
    *,
    seed: int,
    checks: int,
    head: str = "",
    force_context: bool = False,
    tell: Callable[[Interval], object] | None = None,
) -> AuditReport:
    """Checks the chain and the checkpoints of a run, and recomputes ``checks`` of its intervals. Writes nothing.

    Args:
        folder: of the run.
        seed: chooses the intervals. It proves more if it was not known before the head of the chain was.
        checks: number of intervals; 0: all.
        head: a hash that the run's owner published or signed; it must be one of the chain.
        force_context: compares with other software, another device or another number of threads, too.
        tell: called before an interval is recomputed.

    Raises:
        ConfigError: the run cannot be audited; says why.
        CheckpointMismatch: software, device or threads differ from those of the run.
    """
    starts = read_starts(folder)
    refused = next((start for start in starts if start.level != "A"), None)
    if refused is not None:
        raise ConfigError(
            f"The run in '{folder}' was trained with {refused.strategy}, which promises level {refused.level}: its "
            "bits cannot be expected here. Only runs of level A can be audited."
        )
    report = partial(AuditReport, folder=folder, seed=seed, context=starts[-1].context)
    try:
        chain = read_chain(folder)
    except ConfigError as error:
        if not (folder / FILE).is_file():
            raise
        broken = AuditFinding(where="chain", what=str(error))
        return report(chain=Chain((), ()), intervals=[], checked=[], findings=[broken], layouts=[])
    found = [*_recipe_findings(folder, chain), *_checkpoint_findings(folder, chain)]
    if head and head not in chain.hashes:
        what = f"none of its hashes is {head}, so it is not the chain that was published"
        found.append(AuditFinding(where="chain", what=what))
    every = intervals(folder, chain)
    chosen = choose(every, seed, checks)
    for interval in chosen if not found else ():
        if tell is not None:
            tell(interval)
        finding = recompute(folder, chain, interval, force_context=force_context)
        found += [finding] if finding is not None else []
    layouts = [f"{start.strategy} on {start.ranks}" for start in starts]
    return report(chain=chain, intervals=every, checked=chosen, findings=found, layouts=layouts)


def _recipe_findings(folder: Path, chain: Chain) -> Iterator[AuditFinding]:
    """Starts whose recorded recipe differs from that of ``job.json``, and recorded steps that are missing."""
    recorded = chain.last("start")
    starts = read_starts(folder)
    for start in starts:
        entry = recorded.get(start.step)
        if entry is None:
            yield AuditFinding(where=f"step {start.step}", what="job.json has a start here that is not in the chain")
        elif entry["recipe"] != recipe_digest(start.job):
            what = "job.json has another recipe than the one the run recorded when it started here"
            yield AuditFinding(where=f"step {start.step}", what=what)
    steps = chain.last("step")
    missing = sorted(set(range(starts[0].step, max(steps, default=-1) + 1)) - set(steps))
    if missing:
        yield AuditFinding(where=f"step {missing[0]}", what=f"the chain has no line for {plural(len(missing), 'step')}")


def _checkpoint_findings(folder: Path, chain: Chain) -> Iterator[AuditFinding]:
    """Checkpoints and weights that are left and are not those that the run recorded."""
    recorded = {str(entry["name"]): entry for entry in chain.entries if entry["kind"] == "checkpoint"}
    for path in checkpoint.committed(folder):
        entry = recorded.get(path.name)
        if entry is None:
            yield AuditFinding(where=path.name, what="the chain has no line for this checkpoint")
            continue
        try:
            same = digest_file(path / MANIFEST) == entry["manifest"]
            checkpoint.verify(path)
        except (CheckpointError, OSError) as error:
            yield AuditFinding(where=path.name, what=f"it is not what the run wrote: {error}")
        else:
            if not same:
                yield AuditFinding(where=path.name, what="its files are not those whose digests the run recorded")
    ends = [entry for entry in chain.entries if entry["kind"] == "end"]
    for name, key in ((WEIGHTS, "weights"), (AVERAGE, "average")):
        found = digest_file(folder / name) if (folder / name).is_file() else ""
        if chain.end is not None and chain.end.get(key):
            if found != chain.end[key]:
                yield AuditFinding(where=name, what="the file is not the one that the run wrote at its end")
        elif found and found not in [entry.get(key, found) for entry in ends]:  # old chains have no average
            yield AuditFinding(where=name, what="the chain has no line for this file")


def recompute(folder: Path, chain: Chain, interval: Interval, *, force_context: bool = False) -> AuditFinding | None:
    """Trains an interval again on one device; the first difference, or None. Raises as ``audit`` does."""
    origin = find_origin(folder, interval.first)
    try:
        trainer = trainer_at(origin, force_context=force_context)
    except CheckpointError as error:
        return AuditFinding(where=origin.label, what=f"it cannot be loaded: {error}")
    with closing(trainer.run):
        if not force_context:
            require_context(trainer.run, origin)
        comparer = _Comparer(trainer.run, chain)
        trainer.run.add_callback(comparer)
        try:
            _train(trainer, interval.end, origin.start.job.training.epochs, comparer)
        except LockstepError as error:
            what = f"it cannot be computed again: {error}"
            return comparer.finding or AuditFinding(where=f"step {comparer.step}", what=what)
        return comparer.finding or _state_finding(folder, trainer, chain, interval)


def _train(trainer: Trainer, end: int, epochs: int, comparer: _Comparer) -> None:
    """Trains up to a step, or to the first difference."""
    for _ in trainer.run.epochs(epochs):
        for batch in trainer.batches():
            trainer.train_step(batch)
            if comparer.finding is not None or batch.plan.step + 1 >= end:
                return


class _Comparer(Callback):
    """Compares the data, the loss and the gradient of each step with the chain; notes the first difference."""

    def __init__(self, run: Run, chain: Chain) -> None:
        self._run, self._steps = run, chain.last("step")
        self.finding: AuditFinding | None = None
        self.step = run.position.step

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Compares the data."""
        self.step = batch.plan.step
        recorded = self._steps[self.step]["data"]
        found = digest_batch(self._run, batch)
        others = [k for k, digest in enumerate(found) if recorded[k : k + 1] != [digest]]
        if others:
            samples = [number for k in others for number in batch.plan.numbers(k)]
            self._note(
                f"the data of micro-batch {shorten(others)} is not what the run trained on here (samples "
                f"{shorten(samples, 16)})"
            )

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Compares the gradient, then the loss."""
        entry = self._steps[batch.plan.step]
        recorded = GradientDigest.from_table(entry["gradient"])
        found = GradientDigest.of(digest_gradients(self._run)[0])
        if found.digest != recorded.digest:
            what = found.difference(recorded, _MOST_NAMES) or "the whole"
            self._note(f"the gradient of {what} is not the recorded one")
        elif float(loss).hex() != entry["loss"]:
            mine, theirs = float(loss), float.fromhex(entry["loss"])
            self._note(f"the loss is {mine:.9g} and was recorded as {theirs:.9g}")

    def _note(self, what: str) -> None:
        if self.finding is None:
            self.finding = AuditFinding(where=f"step {self.step}", what=what)


def _state_finding(folder: Path, trainer: Trainer, chain: Chain, interval: Interval) -> AuditFinding | None:
    """Compares the state at the end of an interval with its checkpoint, or with the recorded last fingerprint."""
    fingerprint = trainer.run.fingerprint()
    end = chain.end if chain.end is not None and chain.end["step"] == interval.end else None
    if end is not None and end["fingerprint"] != fingerprint:
        what = f"the run ends with the fingerprint {fingerprint}, and {end['fingerprint']} was recorded"
        return AuditFinding(where=f"the end of step {interval.end - 1}", what=what)
    for file, tensors in trainer.results().items() if end is not None else ():
        written = safetensors.torch.load_file(folder / file) if (folder / file).is_file() else tensors
        if names := sorted(differing(digest_tensors(tensors), digest_tensors(written))):
            what = f"the trained weights are not those of the file: {shorten(names, _MOST_NAMES)}"
            return AuditFinding(where=file, what=f"{what} ({len(names)} in all)")
    if interval.checkpoint is None:
        return None
    mine = trainer.run.require_prepared().state.capture(fingerprint, keep=True)
    names = sorted(differing(_digests(mine), _digests(checkpoint.read(interval.checkpoint))))
    if not names:
        return None
    what = f"the state after it is not that of {interval.checkpoint.name}: {shorten(names, _MOST_NAMES)}"
    return AuditFinding(where=f"step {interval.end - 1}", what=f"{what} ({len(names)} in all)")


_PROGRESS = ("scaler", "schedulers", "zero_gradients", "fingerprint")


def _digests(state: CheckpointState) -> dict[str, str]:
    """Digests of all that training continues from, by name."""
    rest = {f"optimizer {n} settings": record for n, record in state.optimizer_records.items()}
    rest |= {name: state.progress.get(name) for name in _PROGRESS}
    texts = {name: hashlib.sha256(canonical(encode(value, name))).hexdigest() for name, value in rest.items()}
    of_optimizers = {f"optimizer {name}": tensor for name, tensor in state.compared.items()}
    return {**digest_tensors(state.model), **digest_tensors(of_optimizers), **texts}


def describe(report: AuditReport) -> str:
    """The report for the terminal, one fact a line; the last says whether the run is what it claims to be."""
    chain, every, checked = report.chain, report.intervals, report.checked
    rows = []
    if report.layouts:
        rows.append(("run", f"{report.folder}, trained with {', then '.join(report.layouts)}"))
    if chain.entries:
        steps, kept = len(chain.last("step")), len({i.checkpoint for i in every if i.checkpoint})
        rows.append(("chain", f"unbroken: {plural(steps, 'step')}, {plural(kept, 'checkpoint')} left"))
        rows.append(("head", chain.head))
    if chain.entries and chain.end is None:
        rows.append(("end", "not recorded: the run was stopped, or its last lines were removed"))
    if report.findings:
        return "\n".join(labelled([*rows, *(("differs", str(finding)) for finding in report.findings)]))
    done, whole = sum(i.end - i.first for i in checked), sum(i.end - i.first for i in every)
    chosen = f"{len(checked)} of {plural(len(every), 'interval')}, chosen by seed {report.seed}"
    rows.append(("checked", f"{chosen}: {'; '.join(map(str, checked))}"))
    rows.append(("cost", f"{plural(done, 'step')} of {whole}"))
    found = chance(len(every), len(checked))
    percent = 100 if found == 1 else min(99, round(100 * found))
    rows.append(("chance", f"{percent} % that a change within one interval would have been found"))
    rows.append(("result", "equal: everything that was checked has the recorded bits"))
    return "\n".join(labelled(rows))


_NAMESPACE = "lockstep-audit"
"""The purpose of a signature, so that one of another file's cannot stand here."""


def sign(folder: Path, key: Path) -> Path:
    """Signs the chain of a run with a private key of ``ssh-keygen``; returns the signature's file.

    Raises:
        ConfigError: there is no sound chain, or ``ssh-keygen`` cannot sign it.
    """
    read_chain(folder)
    signature = folder / f"{FILE}.sig"
    signature.unlink(missing_ok=True)
    _ssh_keygen(["sign", "-f", str(key), "-n", _NAMESPACE, str(folder / FILE)])
    return signature


def verify_signature(folder: Path, public_key: Path) -> None:
    """Raises ``ConfigError`` unless the chain of a run is signed by the private key of ``public_key``."""
    signature = folder / f"{FILE}.sig"
    if not signature.is_file():
        raise ConfigError(
            f"'{folder}' has no {signature.name}. Its owner makes one with lockstep audit RUN --sign KEY."
        )
    try:
        chain, key = (folder / FILE).read_bytes(), public_key.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The signature cannot be checked: {error}.") from error
    with tempfile.NamedTemporaryFile("w", suffix=".signers") as signers:
        signers.write(f"owner {key}\n")
        signers.flush()
        _ssh_keygen(["verify", "-f", signers.name, "-I", "owner", "-n", _NAMESPACE, "-s", str(signature)], given=chain)


def _ssh_keygen(arguments: Sequence[str], given: bytes = b"") -> None:
    """Runs ``ssh-keygen -Y``; ``ConfigError`` with its own words where it fails."""
    try:
        done = subprocess.run(["ssh-keygen", "-Y", *arguments], input=given, capture_output=True, check=False)
    except OSError as error:
        raise ConfigError(f"ssh-keygen cannot be run: {error.strerror}. Install OpenSSH.") from error
    if done.returncode:
        words = (done.stderr + done.stdout).decode(errors="replace").strip().splitlines()
        raise ConfigError(f"ssh-keygen {arguments[0]} failed: {words[-1] if words else 'it says nothing'}.")
