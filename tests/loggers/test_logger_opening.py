import subprocess
import sys

import pytest

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.loggers import open_loggers


def test_only_the_main_process_has_loggers(tmp_path):
    other = World(rank=1, world_size=2, local_rank=1, local_world_size=2, rendezvous="file:///x")
    logger = open_loggers(other, tmp_path, ["console", "jsonl", "tensorboard"])
    logger.begin(0, epochs=1, start=0, steps=1)
    logger.log(1, {"loss": 1.0})
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_a_run_lie_in_its_folder(tmp_path):
    logger = open_loggers(World(), tmp_path, ["jsonl"])
    logger.log(1, {"loss": 1.0})
    logger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = open_loggers(World(), None, ["jsonl", "tensorboard"])
    logger.log(1, {"loss": 1.0})
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_logger_is_refused_on_every_process(tmp_path):
    with pytest.raises(ConfigError, match=r"'tensorbord' is not known\. Did you mean 'tensorboard'"):
        open_loggers(World(), tmp_path, ["tensorbord"])


def test_importing_the_loggers_imports_no_torch():
    code = "import sys, lockstep.loggers; sys.exit('torch' in sys.modules or 'tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
