"""Random faults end as docs/faults.md promises; ``make chaos`` does as many as there is time for."""

import pytest
from tests.soak.chaos import FAULTS, Chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("P1", "P3", "P4", "P5", "P6", "P12", "T1", "T2", "N1")
def test_runs_under_random_faults_end_as_promised(tmp_path):
    chaos = Chaos(tmp_path)
    try:
        for number in range(80):
            chaos.run(number)
    finally:
        chaos.soak.close()
    assert not chaos.findings, "\n".join(chaos.findings)
    missing = set(FAULTS) - {name for name, _ in chaos.outcomes}
    assert not missing, f"the numbers draw no {missing}"
