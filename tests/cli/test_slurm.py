"""``lockstep slurm``: the script that is written, and what is refused before."""

import pytest


def test_a_job_on_gpus_gets_a_script_that_resumes_it(command):
    # Fmt: skip
    status, output, errors = command(
        "slurm",
        "digits",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--time",
        "1:00:00",
        "--restarts",
        "2",
        "--sbatch=--mem=1G",
        "--set",
        "training.global_batch=64",
        "--epochs",
        "3",
    )
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "#!/bin/bash"
    head = [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=2" in head and "#SBATCH --ntasks-per-node=1" in head
    assert "#SBATCH --gpus-per-node=4" in head and "#SBATCH --signal=USR1@120" in head
    assert "#SBATCH --cpus-per-task=4" in head and not [line for line in head if "partition" in line]
    assert head[-2:] == ["#SBATCH --requeue", "#SBATCH --mem=1G"]
    assert 'srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \\' in lines
    assert (
        "    lockstep train digits --set run.grace=110 --set training.global_batch=64 --epochs 3 --devices 0,1,2,3 "
        "--nnodes slurm --set run.name=digits-${SLURM_JOB_ID} --resume auto || status=$?"
    ) in lines
    assert "export LOCKSTEP_TOKEN" in lines
    assert 'if [[ "$status" =~ ^(75|137)$ ]] && [ "${SLURM_RESTART_COUNT:-0}" -lt 2 ]; then' in lines
    assert lines[-1] == 'exit "$status"'


def test_ranks_on_cpus_get_as_many_cores_as_threads(command):
    _, output, _ = command("slurm", "digits", "--tasks-per-node", "2", "--threads", "3")
    assert "#SBATCH --cpus-per-task=6\n" in output
    assert "--devices cpu:2 " in output
    assert "gpus" not in output


def test_one_node_needs_no_token_and_a_grace_of_the_user_stays(command):
    _, output, _ = command("slurm", "digits", "--gpus-per-node", "1", "--set", "run.grace=5")
    assert "LOCKSTEP_TOKEN" not in output
    assert "--set run.grace=110 --set run.grace=5 " in output, "the last one counts"
    assert "--devices 0, " in output


def test_the_script_is_written_to_a_file_that_can_be_run(command, tmp_path):
    status, output, _ = command("slurm", "digits", "--output", "job.sh")
    assert (status, output) == (0, "Wrote job.sh. Submit it with: sbatch job.sh\n")
    assert (tmp_path / "job.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "0"), "--nodes is 0, and must be at least 1."),
        (("--time", "soon"), "--time 'soon' is not a time. Use minutes, H:MM:SS or D-HH:MM:SS."),
        (("--nodes", "16"), "micro_batches=8"),
    ],
)
def test_what_does_not_fit_is_refused(command, arguments, said):
    status, output, errors = command("slurm", "digits", *arguments)
    assert (status, output) == (2, "")
    assert said in errors


def test_without_sbatch_the_script_is_not_submitted(command, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, errors = command("slurm", "digits", "--submit")
    assert status == 2
    assert "sbatch was not found on this host" in errors
