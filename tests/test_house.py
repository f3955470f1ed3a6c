"""The house rules of ``src/lockstep`` hold; ``make house ARGS=-v`` prints the counts and the places."""

from tests import house


def test_the_package_is_small_enough_to_find_ones_way():
    assert len(house.modules()) <= house.MOST_FILES
    assert sum(path.read_text().count("\n") for path in house.modules().values()) <= house.MOST_LINES


def test_a_small_file_has_more_than_one_user():
    assert not house.lonely_small_files(house.trees())


def test_a_class_name_stands_for_one_thing():
    assert not house.doubled_classes(house.trees())


def test_standard_terms_have_replaced_the_old_names():
    assert not house.old_names(house.trees())


def test_no_method_is_replaced_at_run_time():
    assert not house.replaced_methods(house.trees())


def test_no_condition_hangs_on_the_name_of_a_file():
    assert not house.compared_file_names(house.trees())


def test_the_rules_find_what_breaks_them():
    import ast

    broken = {
        "lockstep.a": ast.parse(
            "class Twice: ...\nclass Hub: ...\ndef mark(): ...\nheartbeat.mark = mark\n"
            "setattr(Run, 'save', mark)\nif 'reader.py' in stack or '/data/' in stack: ...\n"
        ),
        "lockstep.b": ast.parse("class Twice: ...\n"),
    }
    assert set(house.doubled_classes(broken)) == {"Twice"}
    assert house.old_names(broken) == ["lockstep.a:2: Hub"]
    assert len(house.replaced_methods(broken)) == 3
    assert len(house.compared_file_names(broken)) == 2
