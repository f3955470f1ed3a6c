"""The target of a launch: a script, an entry point with a JSON payload, or a Python function.

It is sent to the ranks as JSON over a private pipe. Only the arguments of a function are pickled, by the program that
starts the ranks.
"""

from __future__ import annotations

import base64
import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.checks import from_plain, near_path
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScriptTarget:
    """A user's script, run as ``__main__``."""

    path: str
    arguments: tuple[str, ...] = ()
    module: str = ""
    """Its name where it is run as ``python -m`` would, so that it can import from its package."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_file() or self.path.startswith(("/dev/", "/proc/")):  # each rank reads it
            advice = (
                " Leave that word out." if self.path.startswith("python") and self.arguments else " Check the path."
            )
            raise ConfigError(f"The script {self.path!r} is not a file.{near_path(self.path) or advice}")
        if Path(self.path).suffix == ".toml":
            raise ConfigError(f"{self.path!r} is a job, not a script. To train it: lockstep train {self.path!r}.")
        with Path(self.path).open("rb") as file:
            if b"\0" in file.read(4096) or Path(self.path).suffix == ".ipynb":
                raise ConfigError(
                    f"{self.path!r} is not Python source. A notebook becomes a script by jupyter nbconvert --to script."
                )

    @classmethod
    def from_words(cls, words: Sequence[str]) -> ScriptTarget:
        """The target of ``SCRIPT ARGUMENTS`` or ``-m MODULE ARGUMENTS``; ``ConfigError`` if there is no such file."""
        if words[0] != "-m":
            return cls(path=words[0], arguments=tuple(words[1:]))
        if len(words) == 1:
            raise ConfigError("-m needs the name of a module, such as -m package.train.")
        name = words[1]
        for folder in dict.fromkeys((str(Path.cwd()), *sys.path)):
            path = Path(folder, *name.split("."))
            files = {f"{name}.__main__": path / "__main__.py", name: path.with_name(f"{path.name}.py")}
            for module, file in files.items():
                if file.is_file():
                    return cls(path=str(file), arguments=tuple(words[2:]), module=module)
        raise ConfigError(
            f"There is no module {name!r} in the current folder or among the installed packages. Give its name with "
            "dots and without .py, as for python -m, from the folder that its package is in."
        )


@dataclass(frozen=True, kw_only=True)
class EntryTarget:
    """A function of an importable module, called with one JSON value."""

    entry: str
    """``package.module:function``."""
    payload: Any = None
    """A JSON value."""


@dataclass(frozen=True, kw_only=True)
class FunctionTarget:
    """A Python function named by its module, with pickled arguments; its return value comes back as JSON."""

    module: str
    name: str
    main_path: str = ""
    """The script that was started, if the function is defined there."""
    arguments: str = ""
    """Base64 of the pickled ``(args, kwargs)``."""
    search_path: tuple[str, ...] = field(default_factory=tuple)

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FunctionTarget:
        """Names a function so that another process can import it; ``ConfigError`` if that is impossible."""
        module, name, main_path = _address(function)
        try:
            pickled = pickle.dumps((args, dict(kwargs)))
        except Exception as error:
            raise ConfigError(
                f"The arguments for {name} cannot be sent to another process: {error}. "
                "Pass plain values, and build the rest inside the function."
            ) from error
        return cls(
            module=module,
            name=name,
            main_path=main_path,
            arguments=base64.b64encode(pickled).decode(),
            search_path=tuple(sys.path),
        )


Target = ScriptTarget | EntryTarget | FunctionTarget
_KINDS: dict[str, type[Target]] = {kind.__name__: kind for kind in (ScriptTarget, EntryTarget, FunctionTarget)}


def to_json(target: Target) -> dict[str, Any]:
    """Returns the target as a JSON value."""
    return {"kind": type(target).__name__, **asdict(target)}


def from_json(value: Mapping[str, Any]) -> Target:
    """Reads the result of ``to_json``."""
    fields = dict(value)
    target: Target = from_plain(_KINDS[fields.pop("kind")], fields)
    return target


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Returns module, qualified name, and the path of the main script if the function is defined there."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or resolve_name(sys.modules.get(module), name) is not function:
        raise ConfigError(
            f"{name or function!r} cannot be imported by another process, which running it on every rank needs. "
            "Give a function defined by `def` at the top level of a file, not a lambda or an inner function."
        )
    if module != "__main__":
        return module, name, ""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return spec.name, name, ""
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        raise ConfigError(
            f"{name} is defined in a notebook or an interactive session, from which another process cannot "
            "import it. Move it into a .py file and import it from there."
        )
    return "__main__", name, str(Path(path).resolve())


def resolve_name(module: Any, name: str) -> Any:
    """Returns what a qualified name stands for in a module; None if there is no such thing."""
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), module)
