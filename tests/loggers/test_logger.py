import pytest

from lockstep.loggers import MultiLogger


class Recorder:
    def __init__(self, failing=""):
        self.calls, self.failing = [], failing

    def _call(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise OSError(28, "No space left on device")

    def begin(self, epoch, *, epochs, start, steps, done, total):
        self._call("begin")

    def log(self, step, values, so_far=None):
        self._call("log")

    def epoch(self, epoch, step, values, *, is_last):
        self._call("epoch")

    def close(self):
        self._call("close")


def use(logger):
    logger.begin(0, epochs=2, start=0, steps=2)
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 0.5})
    logger.epoch(0, 2, {"accuracy": 0.9})
    logger.close()


@pytest.mark.parametrize("call", ["begin", "log", "epoch", "close"])
@pytest.mark.fault("M12")
def test_a_logger_that_fails_is_named_once_and_the_others_go_on(call, caplog):
    broken, sound = Recorder(call), Recorder()
    use(MultiLogger([broken, sound]))
    assert sound.calls == ["begin", "log", "log", "epoch", "close"]
    assert broken.calls.count(call) == (2 if call == "close" else 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Logger Recorder failed and is disabled" in caplog.text
    assert "No space left on device" in caplog.text


def test_an_interrupt_is_not_taken_for_a_broken_logger():
    class Interrupted(MultiLogger):
        def log(self, step, values, so_far=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MultiLogger([Interrupted()]).log(1, {})


def test_a_logger_of_none_takes_everything():
    use(MultiLogger())
