import pytest

from lockstep.errors import ConfigError
from lockstep.profile.trace import DEFAULT, ProfileWindow


def test_a_window_is_where_it_begins_and_how_many_steps_it_holds():
    assert ProfileWindow.parse("10:5") == ProfileWindow(first=10, count=5)
    assert ProfileWindow.parse(DEFAULT).count > 0


@pytest.mark.parametrize("text", ["10", "10:0", ":5", "-1:5", "1:2:3", "digits", "1:9999999999999999999", "1.5:2"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"not a range of steps. Use FIRST:COUNT, for example 10:5"):
        ProfileWindow.parse(text)
