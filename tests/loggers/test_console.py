import io
import threading

from lockstep.loggers import Console, MultiLogger


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(console, epochs=2):
    for epoch in range(epochs):
        console.begin(epoch, epochs=epochs, start=4 * epoch, steps=4)
        for step in (1, 2, 3, 4):
            console.log(4 * epoch + step, {"loss": 0.25, "accuracy": 0.875, "samples_per_second": 12345.6})
        console.epoch(epoch, 4 * (epoch + 1), {"loss": 0.123456, "validation_accuracy": 0.9722})
    console.close()


def test_an_accuracy_that_is_given_in_percent_is_not_multiplied():
    """A metric of the user's that is called accuracy, of 43.24, was shown as 4324.00 %."""
    stream = io.StringIO()
    Console(stream).epoch(0, 4, {"validation_accuracy": 43.24, "validation_top5_accuracy": 1.0}, is_last=True)
    assert stream.getvalue() == "epoch 1/1  validation accuracy 43.24  validation top5 accuracy 100.00 %\n"


def test_into_a_file_goes_one_line_per_epoch_and_nothing_else():
    stream = io.StringIO()
    run(Console(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("epoch 1/2  loss 0.1235  validation accuracy 97.22 %  ")
    assert lines[0].endswith(" s left")
    assert lines[1] == "epoch 2/2  loss 0.1235  validation accuracy 97.22 %"
    assert len(lines) == 2


def test_on_a_terminal_a_bar_shows_readings_and_time_left():
    stream = Terminal()
    console = Console(stream)
    console.begin(0, epochs=3, start=8, steps=4)
    console.log(10, {"loss": 0.25, "accuracy": 0.875, "samples_per_second": 12345.6})
    console._bar.refresh()
    shown = stream.getvalue().split("\r")[-1]
    assert "epoch 1/3:  50%" in shown
    assert "2/4" in shown
    assert "left, loss 0.25, accuracy 87.50 %, 12,346 samples/s" in shown
    console.close()


def test_a_bar_shows_the_loss_and_accuracy_of_the_epoch_and_the_latest_speed():
    stream = Terminal()
    console = Console(stream)
    console.begin(0, epochs=3, start=8, steps=4)
    latest = {"loss": 0.25, "accuracy": 0.875, "samples_per_second": 10.0, "learning_rate": 0.5}
    console.log(10, latest, {"loss": 0.75, "accuracy": 0.5, "samples_per_second": 7.0})
    console._bar.refresh()
    assert stream.getvalue().split("\r")[-1].endswith("left, loss 0.75, accuracy 50.00 %, 10 samples/s, lr 0.5]")
    console.close()


def test_the_number_of_a_class_stays_with_its_name():
    """``validation iou 0 1`` did not tell which of the two numbers was the value."""
    stream = io.StringIO()
    console = Console(stream)
    console.begin(0, epochs=1, start=0, steps=4)
    console.epoch(0, 4, {"validation_iou_0": 1.0, "learning_rate_1": 0.5})
    assert "validation iou_0 1  lr_1 0.5" in stream.getvalue()


def test_the_learning_rate_and_the_loss_scale_stand_beside_the_loss():
    stream = Terminal()
    console = Console(stream)
    console.begin(0, epochs=3, start=8, steps=4)
    console.log(10, {"loss": 0.25, "learning_rate": 0.0125, "loss_scale": 4096.0})
    console._bar.refresh()
    assert "left, loss 0.25, lr 0.0125, loss scale 4096" in stream.getvalue().split("\r")[-1]
    console.close()


def test_a_bar_leaves_only_the_lines_of_the_epochs_behind():
    stream = Terminal()
    run(Console(stream))
    settled = [line.split("\r")[-1] for line in stream.getvalue().split("\n")]
    assert [line.split("  ")[0] for line in settled] == ["epoch 1/2", "epoch 2/2", ""]


def test_a_bar_starts_no_thread():
    before = threading.active_count()
    console = Console(Terminal())
    console.begin(0, epochs=1, start=0, steps=4)
    assert threading.active_count() == before
    console.close()


def test_a_run_resumed_within_an_epoch_starts_its_bar_there():
    console = Console(Terminal())
    console.begin(1, epochs=2, start=4, steps=4)
    console.log(7, {"loss": 1.0})
    assert console._bar.n == 3
    console.close()


def test_a_closed_terminal_warns_once_and_training_goes_on(caplog):
    stream = io.StringIO()
    stream.close()
    run(MultiLogger([Console(stream)]))
    assert len(caplog.records) == 1
    assert "Logger Console failed and is disabled" in caplog.text


class Clock:
    """Stands for the module ``time``: ten seconds a step."""

    now = 100.0

    def monotonic(self):
        return self.now


def timed_console(monkeypatch):
    """A console, the clock that it reads, and the stream that it writes to."""
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr("lockstep.loggers.console.time", clock)
    return Console(stream), clock, stream


def lines_of(monkeypatch, *epochs, epochs_in_all=4, **more):
    """The console's lines on epochs of 4 steps, each given as (epoch, steps done before, last step, is_last)."""
    console, clock, stream = timed_console(monkeypatch)
    for epoch, done, end, is_last in epochs:
        console.begin(epoch, epochs=epochs_in_all, start=4 * epoch, steps=4, done=done, **more)
        clock.now += 10.0 * (end - 4 * epoch - done)
        console.epoch(epoch, end, {"loss": 1.0}, is_last=is_last)
    return stream.getvalue().splitlines()


def test_the_time_left_is_that_of_the_steps_to_come(monkeypatch):
    lines = lines_of(monkeypatch, (0, 0, 4, False), (1, 0, 8, False))
    assert lines == ["epoch 1/4  loss 1  2 min 00 s left", "epoch 2/4  loss 1  1 min 20 s left"]


def test_a_run_that_goes_on_within_an_epoch_counts_only_the_steps_it_has_made(monkeypatch):
    """It took the rest of an epoch for a whole one, and told a quarter of the time."""
    assert lines_of(monkeypatch, (0, 3, 4, False)) == ["epoch 1/4  loss 1  2 min 00 s left"]


def test_before_the_first_step_no_time_is_known(monkeypatch):
    assert lines_of(monkeypatch, (0, 4, 4, False)) == ["epoch 1/4  loss 1"]


def test_an_evaluation_with_which_a_run_goes_on_is_no_time_of_steps(monkeypatch):
    """A long one counted with every later step."""
    console, clock, stream = timed_console(monkeypatch)
    console.begin(0, epochs=3, start=0, steps=4, done=4)
    clock.now += 600.0
    console.epoch(0, 4, {"loss": 1.0})
    console.begin(1, epochs=3, start=4, steps=4)
    clock.now += 40.0
    console.log(8, {"loss": 1.0})
    console.epoch(1, 8, {"loss": 1.0})
    assert stream.getvalue().splitlines() == ["epoch 1/3  loss 1", "epoch 2/3  loss 1  40 s left"]


def test_evaluations_count_once_for_each_epoch_to_come(monkeypatch):
    """The rest of an epoch has a whole evaluation after it."""
    console, clock, stream = timed_console(monkeypatch)
    console.begin(0, epochs=3, start=0, steps=4, done=3)
    clock.now += 10.0
    console.log(4, {"loss": 1.0})
    clock.now += 7.0
    console.epoch(0, 4, {"loss": 1.0})
    assert stream.getvalue() == "epoch 1/3  loss 1  1 min 34 s left\n"  # 8 steps and two evaluations


def test_a_run_that_ends_within_its_epochs_has_no_time_left(monkeypatch):
    """It told the time of epochs that max_steps, or an early stop, leaves out."""
    lines = lines_of(monkeypatch, (0, 0, 4, False), (1, 0, 6, False), total=6)
    assert lines == ["epoch 1/4  loss 1  20 s left", "epoch 2/4  loss 1"]
    assert lines_of(monkeypatch, (0, 0, 4, True)) == ["epoch 1/4  loss 1"]


def test_the_bar_of_a_run_that_goes_on_begins_where_it_goes_on():
    """It took the steps before for steps of its own, and told too short a time."""
    console = Console(Terminal())
    console.begin(1, epochs=2, start=4, steps=4, done=2)
    assert (console._bar.n, console._bar.initial, console._bar.total) == (2, 2, 4)
    console.begin(1, epochs=2, start=4, steps=4, total=6)
    assert console._bar.total == 2
    console.close()
