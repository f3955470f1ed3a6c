"""Messages of strangers, and records that processes of a run leave for each other, of any content: JSON and bytes."""

import json
import shutil
import socket
from dataclasses import asdict

from tests.fuzz.damage import damaged_bytes, damaged_value
from tests.job.test_run_folder_history import start
from tests.launch.test_outcome import end, record

from lockstep.core.world import World
from lockstep.job.run_folder import FILE as STARTS
from lockstep.job.run_folder import one_recipe, read_starts
from lockstep.launch import runs
from lockstep.launch.hosts.channel import Fault, HostChannel
from lockstep.launch.outcome import judge, report
from lockstep.launch.stragglers import SlowRanks, StepWindows
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import read_record, record_file
from lockstep.runtime.heartbeat import Heartbeat, heartbeat_file, read_beat
from lockstep.text import printable
from lockstep.trainer.gradient_record import FILE as GRADIENTS
from lockstep.trainer.gradient_record import GradientDigest, GradientRecord, read_records

_ODD = [
    "\ud800",
    "a\udfffb",
    "\udcff\ud800",
    "\x1b[2J",
    "\0",
    "é" * 300,
    "9" * 4400,
    "../" * 9,
    "1e999",
    "-1",
]
_NUMBERS = [
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9" * 4301,
    "-0",
    "1" * 400 + ".5",
    "-9223372036854775809",
    "1e-999",
]


def odd_json(value, rng):
    """The text of a JSON value with one part replaced by an odd string or number, or put very deep."""
    mark = "in this place"
    kind = rng.randrange(4)
    if kind == 0:
        return _escaped(damaged_value(value, rng))
    text = _escaped(_with(value, mark, rng))
    odd = {
        1: lambda: _escaped(rng.choice(_ODD)),
        2: lambda: rng.choice(_NUMBERS),
        3: lambda: _deep(rng, rng.choice((5, 60, 300, 1_000, 20_000, 100_000))),
    }[kind]()
    return text.replace(_escaped(mark), odd)


def _escaped(value):
    return json.dumps(value)  # lone surrogates become escapes


def _with(value, mark, rng):
    """The value with the mark in some place of it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {**value, mark: value[key]}
        return {**value, key: _with(value[key], mark, rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _with(value[at], mark, rng), *value[at + 1 :]]
    return mark


def _deep(rng, depth):
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"nonce":', "}]")))
    return opening * depth + "0" + closing * (depth if rng.random() < 0.7 else 0)


class Attempt:
    """Writes or sends one of them, odd in one place, and reads it as a run would."""

    def __init__(self, folder):
        (folder / "run").mkdir()
        Heartbeat.open(World(run_directory=str(folder / "run"))).mark("forward", step=3)
        self._beat = heartbeat_file(folder / "run", 0).read_bytes()
        runs.write_note(folder / "run", "some-run", ["lockstep", "run"], folder, 1)
        self._note = json.loads((folder / "run" / "run.json").read_text())
        digest = GradientDigest.of({"fc.weight": "a" * 64, "fc.bias": "b" * 64})
        of_step = GradientRecord(step=7, loss="0x1p0", norm=2.0, gradient=digest, micro_batches={0: digest, 3: digest})
        self._gradients = json.loads(of_step.to_json())
        self._start = start(0).as_table()

    def __call__(self, rng, folder):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kinds = (
            self._greeting,
            self._heartbeat,
            self._note_of_run,
            self._error,
            self._starts,
            self._gradient,
        )
        return rng.choice(kinds)(rng, folder)

    def _greeting(self, rng, folder):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = HostChannel(ours, b"token", "server")
            lines = [{"hello": "lockstep 2", "nonce": "00" * 32}, {"proof": "00" * 32}, {"proof": "11" * 32}]
            odd = rng.randrange(len(lines))
            for number, line in enumerate(lines):
                text = (odd_json(line, rng) if number == odd else json.dumps(line)).encode()
                sent = damaged_bytes(text, rng) if rng.random() < 0.2 else text
                try:
                    theirs.sendall(sent[:100_000] + b"\n")
                except OSError:
                    break
                assert channel.receive() == []
            assert not channel.is_proven
            return "a stranger is " + ("refused" if channel.fault is not Fault.NONE else "waited for")

    def _heartbeat(self, rng, folder):
        heartbeat_file(folder, 0).write_bytes(damaged_bytes(self._beat, rng))
        beat = read_beat(folder, 0)
        SlowRanks().take(StepWindows(folder).look({0: 1}))
        if beat is None:
            return "no heartbeat"
        lost = end(0, -9, beat=beat)
        printed(report(judge([lost], StopReason.NONE), [lost], StopReason.NONE, folder))
        return "a heartbeat"

    def _note_of_run(self, rng, folder):
        (folder / "run.json").write_text(odd_json(self._note, rng), errors="surrogatepass")
        run = runs._read(folder)
        if run is None:
            return "no run"
        printed([run.command, run.run_id, run.logs, f"{run.started:.0f} {run.ranks:d}"])
        return "a run"

    def _error(self, rng, folder):
        text = odd_json(asdict(record(0, 3.0)), rng)
        record_file(folder, 0).write_text(text, errors="surrogatepass")
        found = read_record(folder, 0)
        if found is None:
            return "no record"
        ends = [end(0, 4, record=found), end(1, -15)]
        verdict = judge(ends, StopReason.NONE)
        assert 0 < verdict.code < 256, verdict
        printed(report(verdict, ends, StopReason.NONE, folder))
        return "a record"

    def _starts(self, rng, folder):
        table = {"starts": [self._start, {**self._start, "step": 4}]}
        (folder / STARTS).write_text(odd_json(table, rng), errors="surrogatepass")
        one_recipe(read_starts(folder))
        return "starts"

    def _gradient(self, rng, folder):
        lines = [odd_json(self._gradients, rng), json.dumps(self._gradients)]
        (folder / GRADIENTS).write_text("\n".join(lines) + "\n", errors="surrogatepass")
        found = read_records(folder)
        assert 7 in found
        for each in found.values():
            each.to_json()
        return "gradients"


def printed(lines):
    """A terminal may take them."""
    for line in lines:
        printable(line).encode()
