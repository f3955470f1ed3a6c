"""Fixtures of every test: a restored process, no child left behind, and markers that say why they skip."""

import gc
import logging
import os
import random
import select
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

_GRACE_SECONDS = 2.0
_WRITTEN_SECONDS = 10.0
# Threads of torch that wait for each other sleep: four workers share two cores, where polling takes those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
_STANDING_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (make test-all)")
    parser.addoption("--programs", default="0:2000", help="seeds of the random programs that --slow runs")


def pytest_configure(config):
    """Takes back signals that a background shell or nohup told its children to ignore: they are tested here.

    Examples of hypothesis have no time limit of their own, since four workers share two cores.
    """
    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    # Files with long tests go first, so that no worker is left with one at the end.
    items.sort(key=lambda item: not ("multiprocess" in item.path.name or item.get_closest_marker("timeout")))
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="a longer check: run it with --slow or make test-all")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)


def pytest_runtest_setup(item):
    gc.collect()
    gc.freeze()  # Collections, one of which ends each run, leave out modules and what hundreds of tests have cached.
    marker = item.get_closest_marker("gpus")
    if marker:
        needed = marker.args[0]
        import torch

        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {found}")

    if item.get_closest_marker("shared_memory"):
        from lockstep.distributed.shared_memory import is_available

        if not is_available():
            pytest.skip("ranks share memory on x86-64 Linux; here they exchange by collectives")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Lets checkpoints that are on their way be written before the test's folder goes."""
    if unfinished := sys.modules.get("lockstep.runtime.stop_signals"):
        unfinished.wait_for_critical_threads(_WRITTEN_SECONDS)


class ShortFolders:
    """Makes folders of a given name."""

    def __init__(self, base):
        self.base = base

    def mktemp(self, name):
        """A new folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.base))


@pytest.fixture(scope="session")
def tmp_path_factory():
    """Folders that go with the session. Their paths are short, as that of ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="lt-", ignore_cleanup_errors=True) as folder:
        yield ShortFolders(Path(folder).resolve())


@pytest.fixture
def tmp_path():
    """A folder that goes with the test. Its path is short: sockets lie in it, and theirs may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lt-", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture(autouse=True)
def restored_process():
    """Puts the environment, the working directory, random state and torch's settings back after each test."""
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    streams = random.getstate(), np.random.get_state()
    torch_settings, logger = _torch_settings(), logging.getLogger("lockstep")
    level = logger.level
    yield
    logger.setLevel(level)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(folder)
    sys.path[:] = path
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    _restore_torch(torch_settings)


@pytest.fixture(autouse=True)
def no_child_left():
    """Fails a test that leaves a child process; multiprocessing's own standing helpers do not count."""
    before = _children()
    yield
    left = {pid: command for pid, command in _children().items() if pid not in before and not _ends(pid)}
    assert not left, f"the test left child processes: {left}"


@pytest.fixture(scope="session")
def torchvision():
    """torchvision; its two C++ operators are declared where it cannot load them beside another build of torch."""
    import torch

    try:
        yield pytest.importorskip("torchvision", exc_type=ImportError)
        return
    except RuntimeError:  # they are missing
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield pytest.importorskip("torchvision", exc_type=ImportError)
    del library


@pytest.fixture(scope="session")
def timm(torchvision):
    """timm, which needs torchvision to be importable."""
    return pytest.importorskip("timm")


def _torch_settings():
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "state": torch.random.get_rng_state(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def _restore_torch(settings):
    if settings is None:
        return
    import torch

    torch.random.set_rng_state(settings["state"])
    if torch.get_num_threads() != settings["threads"]:
        torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    if torch.are_deterministic_algorithms_enabled() != settings["deterministic"]:  # imports torch._inductor
        torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_grad_enabled(settings["grad"])
    torch.backends.mha.set_fastpath_enabled(settings["fast path"])


def _children():
    own, found = str(os.getpid()), {}
    for pid in _candidates():
        process = Path(f"/proc/{pid}")
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (process / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
        if parent == own and state != "Z" and not any(helper in command for helper in _STANDING_HELPERS):
            found[int(pid)] = command
    return found


def _candidates():
    """Processes that may be children: those of each thread, or all where the kernel does not list children."""
    found = []
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        try:
            found += (thread / "children").read_text().split()
        except OSError:
            if thread.exists():
                return [each.name for each in Path("/proc").iterdir() if each.name.isdecimal()]
            return _candidates()  # the thread has just ended, and another has its children
    return found


def _ends(pid):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], _GRACE_SECONDS)[0])
    finally:
        os.close(handle)
