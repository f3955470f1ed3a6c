"""Runs a target in this process, which is a rank."""

from __future__ import annotations

import base64
import importlib
import importlib.machinery
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch.targets import EntryTarget, FunctionTarget, ScriptTarget, Target


def run_target(target: Target) -> Any:
    """Runs the target to its end and returns what it returned; a script returns None."""
    if isinstance(target, ScriptTarget):
        return run_script(target)
    if isinstance(target, EntryTarget):
        return _run_entry(target)
    return _run_function(target)


def run_script(target: ScriptTarget) -> None:
    """Runs a script as ``python SCRIPT`` would: as a real ``__main__`` module that stays in ``sys.modules``.

    So whatever the script defines can be pickled for its loader workers.
    """
    path = target.path
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv = [path, *target.arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    exec(code, main.__dict__)


def _run_entry(target: EntryTarget) -> Any:
    sys.argv = [target.entry]
    module, _, name = target.entry.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    function = getattr(importlib.import_module(module), name)
    return function(target.payload)


def _run_function(target: FunctionTarget) -> Any:
    sys.path[:] = target.search_path
    sys.argv = [target.main_path]
    if target.main_path:
        _import_main(target.main_path)
    found: Any = importlib.import_module(target.module)
    for part in target.name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(
            f"{target.name} is not there when {target.main_path or target.module} is imported, not run. "
            "Define it at the top level, outside of `if __name__ == '__main__':`."
        )
    args, kwargs = pickle.loads(base64.b64decode(target.arguments))
    return found(*args, **kwargs)


def _import_main(path: str) -> None:
    """Imports the script that called ``launch`` as multiprocessing does: its guard holds it back."""
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
