"""``launch`` calls a function on new processes, from Python."""

import os
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError, RankError
from lockstep.launch import launch


def total(x, *, times=1):
    import torch
    import torch.distributed as dist

    from lockstep.core.world import World
    from lockstep.distributed.process_group import open_process_group

    world = World.from_environment()
    with open_process_group(world):
        value = torch.tensor([float(world.rank)])
        dist.all_reduce(value)
    return {"rank": world.rank, "sum": float(value) + times * x}


def fails_on_one(limit):
    rank = int(os.environ["RANK"])
    if rank == 1:
        raise KeyError(f"limit {limit}")


def returns_an_object():
    return object()


def test_results_come_back_by_rank():
    assert launch(total, 10, times=2, devices="cpu:2") == [{"rank": rank, "sum": 21.0} for rank in range(2)]


def test_the_package_is_called_by_its_own_name():
    import lockstep

    assert lockstep.launch.launch is launch
    with pytest.raises(ConfigError, match="not a lambda"):
        lockstep.launch(lambda: 1, devices="cpu:1")


def test_a_failing_rank_raises_with_its_traceback(tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*fails_on_one.*KeyError: 'limit 3'"):
        launch(fails_on_one, 3, devices="cpu:2", log_directory=str(tmp_path))


def test_a_result_that_is_not_json_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(RankError, match=r"returns_an_object returned a object, and results must be JSON"):
        launch(returns_an_object, devices="cpu:1", log_directory=str(tmp_path))


def test_a_function_of_the_script_itself_runs_behind_the_guard(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nfrom lockstep.launch import launch\n"
        "print('imported as', __name__, flush=True)\n"
        "class Point:\n    x = 4\n"
        "def square(point):\n    return point.x * point.x + int(os.environ['RANK'])\n"
        "if __name__ == '__main__':\n    print(launch(square, Point(), devices='cpu:2'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["imported as __main__", "imported as __mp_main__", "[16, 17]"]


def test_the_program_that_launches_does_not_import_torch(tmp_path):
    script = tmp_path / "light.py"
    script.write_text(
        "import sys\nfrom lockstep.launch import launch\n"
        "def nothing():\n    return None\n"
        "if __name__ == '__main__':\n    print(launch(nothing, devices='cpu:1'), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[None] False\n", "")


def test_an_inner_function_is_refused():
    def inner():
        pass

    with pytest.raises(ConfigError, match="not a lambda or an inner function"):
        launch(inner, devices="cpu:1")


def test_a_function_of_an_interactive_session_is_refused():
    program = "from lockstep.launch import launch\ndef f(): pass\nlaunch(f, devices='cpu:1')\n"
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert "is defined in a notebook or an interactive session" in done.stderr


def test_a_rank_cannot_launch_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"ranks within ranks\. Put the call under if __name__ == '__main__':"):
        launch(fails_on_one, 1, devices="cpu:1")
