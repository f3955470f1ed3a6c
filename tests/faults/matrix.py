"""Every fault that a run must survive or end well with, and what must come of it; the tests carry the row's number.

    @pytest.mark.fault("P1", "P2")

``open`` says what of a row no test holds, and why; ``python -m tests.faults.table`` writes docs/faults.md from both.
"""

from dataclasses import dataclass

NO_GPU = "there is no GPU on the machines where the tests run"


@dataclass(frozen=True)
class Row:
    """One fault."""

    number: str
    fault: str
    outcome: str
    open: str = ""


SECTIONS = {
    "Processes": (
        Row(
            "P1",
            "a rank is killed (SIGKILL) while others wait for it in a collective",
            "all ranks gone within 5 s; the first line names rank, signal, step and phase; exit code 4",
        ),
        Row(
            "P2",
            "a rank is killed while it, or the others, load data, evaluate, save or start",
            "the same as P1 in every phase",
        ),
        Row(
            "P3",
            "the launcher or the fork server is killed (SIGKILL)",
            "no process of the run is left after 2 s, hung loader workers and what ranks have started included",
            open="a process that a rank has started in another session and with another environment is not found",
        ),
        Row(
            "P4",
            "Ctrl-C",
            "the first stops all ranks at the same step with a checkpoint, if the step ends within 3 s; a second one "
            "ends at once; exit code 130",
        ),
        Row(
            "P5",
            "SIGTERM to the launcher or to any one rank",
            "all ranks save the same step within the grace, exit code 75; the run resumes to the same bits",
        ),
        Row("P6", "SIGUSR1, SIGUSR2 or SIGHUP, as clusters send before they preempt", "as P5"),
        Row(
            "P7",
            "a request to stop that arrives in evaluation, while saving, loading data or starting",
            "it is kept and acted on at the next step, in every phase; the evaluation of a job is left within seconds, "
            "and done again by the resumed run",
            open="in a loop of your own an evaluation is left only with `repeatable=True`, because a resumed run "
            "repeats what stands between the last step and the evaluation, such as a scheduler's step; without it, an "
            "evaluation that outlasts the grace ends the run at its last checkpoint",
        ),
        Row(
            "P8",
            "an exception on one rank",
            "its traceback first, the other ranks in a line each; within 10 s; exit code 4",
        ),
        Row(
            "P9",
            "a rank that ignores SIGTERM when the run is ended",
            "it is killed 3 s later; all gone within 5 s",
        ),
        Row(
            "P10",
            "one rank hangs and the others wait",
            "one report that names the rank that is missing, and not a victim of it; exit code 5",
        ),
        Row(
            "P11",
            "a rank is slower than the others",
            "a warning that names it",
            open="under strategies that exchange within the forward pass or the optimizer's step (fsdp, tensor, "
            "pipeline, parameter_server) the time that a rank waits cannot be told from its work",
        ),
        Row(
            "P12",
            "a rank is stopped (SIGSTOP), cannot be interrupted, or holds the interpreter's lock",
            "told apart by the process's state and its stack; reported within three limits",
            open="the uninterruptible state (D) needs a device that hangs; its verdict is tested as a pure function",
        ),
        Row(
            "P13",
            "the kernel's OOM killer ends a rank",
            "the report says so, with the memory the rank last held; exit code 4",
        ),
        Row(
            "P14",
            "a GPU runs out of memory on one rank",
            "as P8, with the two settings that need less",
            open=f"{NO_GPU}; the lines of the report are tested with a record of such an error",
        ),
        Row(
            "P15",
            "a rank ends well before the others",
            "`rank 1 left at step 2 while the others continued`, within 5 s; exit code 4",
        ),
        Row("P16", "a script forgets destroy_process_group", "a good run exits with 0, every time"),
    ),
    "Start and configuration": (
        Row("S1", "a process never arrives", "after the limit (60 s) every rank ends and names who is missing"),
        Row(
            "S2",
            "the rendezvous address cannot be resolved or reached",
            "a sentence with the address, within the limit; on one host no name is ever resolved",
        ),
        Row(
            "S3",
            "a port is taken",
            "one host needs none; where an address was given, a sentence says it is taken",
        ),
        Row(
            "S4",
            "two runs use one rendezvous",
            "the second is refused at once and told which run is there",
        ),
        Row(
            "S5",
            "ranks differ in settings, software, source code, model or data",
            "what differs is listed by rank on every rank before the first step; exit code 2",
            open="of installed packages but Lockstep the files are not compared",
        ),
        Row("S6", "an unknown setting or option", "refused with the nearest known one before a process starts"),
        Row(
            "S7",
            "several mistakes in one job file",
            "all reported at once with file and line, in less than 1 s",
        ),
        Row(
            "S8",
            "settings that cannot go together or do not fit the machine",
            "one table of rules, each with its example; exit code 2",
        ),
    ),
    "Collectives and replicas": (
        Row(
            "C1",
            "ranks call different collectives",
            "the report shows what each rank called; exit code 5. Different calls of the run, or of a model that no "
            "process holds as a whole, are refused at once on all ranks, with both calls; exit code 2",
        ),
        Row("C2", "ranks give different shapes", "a model is compared before the first step; else as C1"),
        Row(
            "C3",
            "ranks give tensors of different dtypes",
            "the models are compared before the first step, dtypes too",
            open="what a script gives to collectives that it calls itself is not checked, and torch mixes dtypes "
            "silently",
        ),
        Row("C4", "ranks sum in another order or by another operation", "replicas are compared every n steps"),
        Row(
            "C5",
            "ranks hold different models",
            "the first parameter that differs, with both shapes, on every rank",
        ),
        Row(
            "C6",
            "parameters that no loss, or only some micro-batches', depends on",
            "they train with the same bits on any number of ranks",
        ),
        Row(
            "C7",
            "replicas drift apart",
            "found at the next comparison; tensor and ranks are named; exit code 4",
        ),
        Row(
            "C8",
            "samples that do not divide among the ranks",
            "every sample is read, and evaluated, exactly once; shares differ by one at most",
        ),
    ),
    "Network": (
        Row(
            "N1",
            "a host is lost, or cut off in a step",
            "the verdict names the host within 15 s",
        ),
        Row(
            "N2",
            "the network fails for a few seconds",
            "the run heals and goes on with the same bits",
        ),
        Row("N3", "a connection is reset", "as P1: the rank is named, not an address"),
        Row("N4", "the launcher of one host is killed", "no process is left on any host"),
        Row("N5", "a rank cannot join the process group", "the others are told within seconds"),
        Row(
            "N6",
            "node 0 is started again while a host of its former run still looks for it",
            "that host is refused, with both runs named, and ends",
        ),
    ),
    "Checkpoint and resume": (
        Row(
            "K1",
            "killed while a checkpoint is written",
            "the last complete one is there, at every moment of it",
        ),
        Row(
            "K2",
            "the disk is full, or the folder of a run is made read-only while it goes on",
            "what was there stays; a sentence with the place and, for a checkpoint, the sizes; no temporary file stays",
            open="the run ends then; there is no setting to go on without checkpoints",
        ),
        Row(
            "K3",
            "a flipped bit, a cut or zeroed file",
            "refused by checksum; the run goes on from the checkpoint before and says so",
        ),
        Row("K4", "killed while a step is saved again", "the old or the new checkpoint, never a mixture"),
        Row(
            "K5",
            "resumed on another number of ranks, or by another strategy",
            "the same samples and the same bits",
        ),
        Row(
            "K6",
            "a checkpoint whose names, shapes or types differ from the model's",
            "every difference is listed",
        ),
        Row("K7", "a pickle in place of a checkpoint's file", "nothing is unpickled, so nothing runs"),
        Row("K8", "a checkpoint that names files elsewhere, or is a link", "refused"),
        Row("K9", "stopped at any step, also at the end of an epoch", "no sample is repeated or skipped"),
        Row("K10", "saving hangs on one rank", "its own, longer limit; the report names rank, phase and line"),
    ),
    "Data and numbers": (
        Row(
            "D1",
            "a corrupt image",
            "the error names file and sample, exit code 3; or, if asked for, another stands in and it is counted",
            open="`lockstep data JOB` reads every sample beforehand and lists those that cannot be read; of a stream "
            "it reads the first ones only",
        ),
        Row("D2", "a loader worker is killed", "reported at once, with the memory that it may have missed"),
        Row("D3", "a loader worker hangs", "an error after the limit, with the line at which it stands"),
        Row("D4", "an empty class, or one that only one split has", "refused by name before the first step"),
        Row(
            "D7",
            "bits flip in the file of decoded photos",
            "no picture changes: the photo is decoded again, and the record is named once",
        ),
        Row("D5", "a label outside of the classes", "the sample is named before the first step; exit code 3"),
        Row(
            "D6",
            "a loss or gradient that is not finite",
            "all ranks stop before the update and name step and samples; the last checkpoint is finite; exit code 6",
        ),
    ),
    "More": (
        Row("M1", "the terminal is closed (SIGHUP)", "as P5"),
        Row(
            "M2",
            "processes of an earlier run are left, or a run of another process namespace is seen",
            "`lockstep clean` ends exactly those of this namespace, `stop` says where another is; `doctor` names them",
        ),
        Row(
            "M3",
            "a bit flips in one rank's parameters",
            "found at the next comparison; rank and tensor are named",
        ),
        Row(
            "M4",
            "tied, reused or frozen parameters",
            "the same bits on any number of ranks, or refused in a sentence",
        ),
        Row(
            "M5",
            "a slow or lossy link between hosts",
            "the same bits; node 0 says that the exchange between the hosts limits the run",
            open="not under strategies that exchange within the forward pass (fsdp, tensor, pipeline)",
        ),
        Row(
            "M6",
            "a host is lost for good",
            "the run restarts on the hosts that are left, to the same bits",
        ),
        Row("M7", "several interfaces", "loopback on one host; one that was set and is not there is a fault"),
        Row(
            "M8",
            "the run folder exists, cannot be made, or belongs to a run that goes on",
            "refused before the first step, nothing is touched",
        ),
        Row(
            "M9",
            "empty, cut, palette, animated, 16-bit or huge images; devices, pipes and other formats named `.jpg`; "
            "archives and pickles that ask for memory",
            "read right, or named and refused before memory is taken or a program runs",
        ),
        Row(
            "M10",
            "a checkpoint from other software, another device or other settings",
            "refused with what differs; an option goes on",
        ),
        Row(
            "M11",
            "an import path that does not exist or takes other arguments",
            "the part that failed; exit code 2",
        ),
        Row("M12", "a log cannot be written", "one warning, and training goes on"),
        Row("M13", "too few samples, or no folder", "a sentence before the first step"),
    ),
    "Surroundings": (
        Row(
            "T1",
            "the terminal or pipe of the output is gone, or was closed from the start",
            "the run goes on and ends with its own code; what could not be written, and the report of a failure, are "
            "in the log folder",
        ),
        Row(
            "T2",
            "the disk of the logs is full, a rank has no descriptor left, or a limit (`ulimit -f`, `-u`) refuses its "
            "memory or threads",
            "the failure is reported all the same, with its exit code and, for a limit, with its name",
        ),
        Row(
            "T3",
            "the folder in memory (`XDG_RUNTIME_DIR`, `/dev/shm`) is full",
            "another place is taken and said, or the run is refused in a sentence before a rank starts",
        ),
        Row(
            "T4",
            "the file system has no locks (`flock`)",
            "a file that names the owner takes the lock's place, and is said once",
        ),
        Row(
            "T6",
            "a heartbeat, a note, the flags or a record of a run is overwritten with other bytes or JSON of any depth",
            "it counts as none",
        ),
        Row(
            "T7",
            "there is no /proc, the user has no home, few descriptors are left or more than 1,023 are open",
            "stalls are reported, and runs are listed and cleaned, or refused in a sentence",
        ),
        Row("T8", "names of files hold a terminal's escape codes", "messages show them escaped"),
        Row(
            "T5",
            "two runs have one log folder, or it holds a user's files with the names of ours",
            "the second run takes a folder in it with its id, and says so; no file of the user is touched",
        ),
    ),
    "Security": (
        Row("X1", "something listens off the host", "on one host everything listens on loopback"),
        Row(
            "X2",
            "a stranger talks to the run",
            "only who knows the run's secret is heard, and nothing that came from a peer is unpickled",
        ),
        Row("X3", "pickles from a peer, a store or a file", "none is ever loaded"),
        Row("X4", "debugging endpoints", "sockets in a private folder, or, where asked for, on loopback"),
        Row(
            "X5",
            "code of others: a run folder of another user, a module in the current folder named as an installed one",
            "`replay` refuses the folder without `--trust`, and says with `--dry-run` what is imported from where; the "
            "command's own packages are the installed ones",
            open="a job file, a script and the current folder are code and run as you (SECURITY.md)",
        ),
        Row(
            "X6",
            "another program of the host connects to a rank's port before the rank that is waited for (gloo)",
            "nothing is sent to it; the run ends with the rank's number, at the latest after 60 s; exit code 4",
            open="it can still end the run; groups that a script opens by itself are not checked",
        ),
    ),
}

ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
