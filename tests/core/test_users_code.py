"""Code of the user's own is told from that of installed packages."""

import functools
import os
import subprocess
import sys

from lockstep.core.users_code import function_of, homes_of, is_users_function, names_in


def test_packages_in_folders_of_the_system_or_another_environment_are_not_the_users(tmp_path):
    """Those of an environment with --system-site-packages, or in a path file, were taken for the user's own code."""
    for folder in ("site-packages", "dist-packages", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder[:4]}.py").touch()
    code = (
        "import of_site, of_dist, of_mine\nfrom lockstep.core.users_code import is_users_module\n"
        "print([is_users_module(name) for name in ('of_site', 'of_dist', 'of_mine')])"
    )
    folders = [str(tmp_path / each) for each in ("site-packages", "dist-packages", "mine")]
    path = os.pathsep.join([*folders, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "[False, False, True]", done


def outer():
    def inner():
        return sorted(sys.path)

    return inner


def test_names_and_homes_of_code():
    assert names_in(outer.__code__) == {"sorted", "sys", "path"}
    assert homes_of(outer().__code__) == ["outer"] and homes_of(outer.__code__) == []


def test_a_function_is_the_users_by_its_file():
    assert is_users_function(outer) and not is_users_function(os.path.join)


def test_methods_are_the_functions_that_decorators_of_python_got():
    for made in (property(outer), functools.cached_property(outer), staticmethod(outer), classmethod(outer)):
        assert function_of(made) is outer
    assert function_of(3) == 3
