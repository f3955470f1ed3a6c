"""The history of a run in its folder."""

import dataclasses

import pytest

from lockstep.config.job_file import load_job
from lockstep.errors import ConfigError
from lockstep.job.run_folder import FILE, Start, one_recipe, read_starts

DIGITS = load_job("digits", [])


def start(step, **sections):
    """A start with some settings changed, as in ``training={"clip_norm": 1.0}``."""
    changed = {
        name: dataclasses.replace(getattr(DIGITS, name), **values) for name, values in sections.items()
    }
    return Start(
        step=step,
        strategy="ddp",
        shares=[],
        level="A",
        device="cpu",
        context={},
        job=dataclasses.replace(DIGITS, **changed),
    )


def test_a_run_that_only_moved_to_other_devices_has_one_recipe():
    moved = start(
        9, run={"devices": "cpu:4", "name": "x"}, training={"strategy": "fsdp"}, checkpoint={"keep": 9}
    )
    assert one_recipe([start(0), moved])


@pytest.mark.parametrize(
    "changed", [{"training": {"clip_norm": 0.5}}, {"training": {"epochs": 9}}, {"run": {"threads": 2}}]
)
def test_a_run_whose_settings_changed_on_the_way_has_not(changed):
    assert not one_recipe([start(0), start(9, **changed)])


def test_a_run_that_began_from_the_checkpoint_of_another_has_not():
    assert not one_recipe([start(9)])


@pytest.mark.fault("T6")
def test_a_record_of_starts_of_any_depth_is_refused(tmp_path):
    for text in ("[" * 100_000, '{"starts":' * 100_000, '{"starts": [3]}', "\udcff"):
        (tmp_path / FILE).write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ConfigError, match="is not what 'lockstep train' wrote"):
            read_starts(tmp_path)
