"""What a rank that is to answer the supervisor must survive."""

from lockstep.launch.answering import _serve_recorder


def test_a_run_directory_whose_path_is_too_long_for_a_socket_costs_only_the_recorder(tmp_path, capfd):
    """``TMPDIR`` and ``XDG_RUNTIME_DIR`` may be long; a rank used to end with "Error binding" then."""
    path = tmp_path / ("deep" * 30)
    path.mkdir()
    _serve_recorder(path / "recorder-000")
    assert list(path.iterdir()) == []
    assert capfd.readouterr().err == ""
