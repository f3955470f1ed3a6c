import json
import math

import pytest

from lockstep.core.fingerprint import combine
from lockstep.trainer.gradient_record import FILE, GradientDigest, GradientLog, GradientRecord, read_records

DIGESTS = {"fc.weight": "a" * 64, "fc.bias": "b" * 64}


def record(step, digests=DIGESTS, **more):
    return GradientRecord(step=step, loss=(0.5).hex(), norm=2.0, gradient=GradientDigest.of(digests), **more)


def test_a_record_survives_its_line_of_json():
    whole = record(3, micro_batches={0: GradientDigest.of(DIGESTS), 11: GradientDigest.of({})})
    assert GradientRecord.from_json(whole.to_json()) == whole


def test_a_norm_that_is_not_finite_is_written_as_json_that_others_read():
    line = GradientRecord(step=0, loss="nan", norm=math.inf, gradient=GradientDigest.of({})).to_json()
    assert json.loads(line)["norm"] is None
    assert math.isnan(GradientRecord.from_json(line).norm)


def test_a_digest_holds_the_proof_whole_and_of_each_parameter_enough_to_name_it():
    digest = GradientDigest.of(DIGESTS)
    assert digest.digest == combine(DIGESTS)
    assert digest.parameters == {"fc.bias": "b" * 12, "fc.weight": "a" * 12}


def test_parameters_that_differ_are_named_and_so_is_one_that_only_one_side_has():
    mine = GradientDigest.of(DIGESTS)
    assert mine.difference(GradientDigest.of(dict(reversed(DIGESTS.items()))), 5) == ""
    assert mine.difference(GradientDigest.of({**DIGESTS, "fc.bias": "c" * 64}), 5) == "fc.bias (1 of 2 parameters)"
    assert mine.difference(GradientDigest.of({"fc.bias": "b" * 64}), 5) == "fc.weight (1 of 2 parameters)"


def test_a_resumed_run_takes_back_the_steps_that_it_will_do_again(tmp_path):
    log = GradientLog(tmp_path, 0)
    for step in (0, 4, 8):
        log.append(record(step))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 9, "loss": "0x')  # torn by a kill
    GradientLog(tmp_path, 4).append(record(4, {"fc.bias": "d" * 64}))
    found = read_records(tmp_path)
    assert list(found) == [0, 4]
    assert found[4].gradient.parameters == {"fc.bias": "d" * 12}
    assert len((tmp_path / FILE).read_text().splitlines()) == 2


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    lines = ["[]", "5", '{"step": 1}', "not json", record(7).to_json(), '{"step": 8, "micro_batches": 3}']
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    assert list(read_records(tmp_path)) == [7]
    assert read_records(tmp_path / "nowhere") == {}


@pytest.mark.fault("T6")
def test_a_line_of_any_depth_is_no_record(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 100_000, "null", "9" * 5000):
        with pytest.raises((ValueError, TypeError)):
            GradientRecord.from_json(text)
        (tmp_path / FILE).write_text(f"{text}\n{record(1).to_json()}\n")
        GradientLog(tmp_path, 9)
