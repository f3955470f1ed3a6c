import pickle

import numpy as np
import pytest
import torch

from lockstep.data import TokenFiles
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

TOKENS = np.random.default_rng(0).integers(0, 500, 103)


def plain(path, tokens=TOKENS, dtype="<u2"):
    path.write_bytes(tokens.astype(dtype).tobytes())
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_and_their_successors_are_read_from_plain_files(tmp_path, dtype):
    windows = TokenFiles(plain(tmp_path / "a.bin", dtype=f"<u{np.dtype(dtype).itemsize}"), 10, dtype=dtype)
    assert len(windows) == 10
    for index in range(10):
        inputs, targets = windows[index]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == TOKENS[index * 10 : index * 10 + 10].tolist()
        assert targets.tolist() == TOKENS[index * 10 + 1 : index * 10 + 11].tolist()


def test_a_window_lies_within_one_file_and_the_last_whole_one_is_read(tmp_path):
    np.save(tmp_path / "b.npy", TOKENS[:21].astype(np.uint32))
    windows = TokenFiles([plain(tmp_path / "a.bin", TOKENS[:20]), tmp_path / "b.npy"], 10)
    starts = [windows[index][0][0].item() for index in range(len(windows))]
    assert starts == [TOKENS[0], TOKENS[0], TOKENS[10]]
    assert [windows.sample_path(index) for index in range(3)] == [
        "a.bin, token 0",
        "b.npy, token 0",
        "b.npy, token 10",
    ]
    with pytest.raises(IndexError):
        windows[3]


def test_windows_overlap_with_a_stride(tmp_path):
    windows = TokenFiles(plain(tmp_path / "a.bin"), 10, stride=3)
    assert len(windows) == (103 - 11) // 3 + 1
    assert windows[5][0].tolist() == TOKENS[15:25].tolist()


def test_a_micro_batch_is_the_stack_of_its_windows_also_after_pickling(tmp_path):
    windows = TokenFiles(plain(tmp_path / "a.bin"), 10)
    sent = pickle.loads(pickle.dumps(windows))
    assert len(pickle.dumps(windows)) < 2000
    reader = SampleReader(sent, seed=0)
    inputs, targets = reader.read(0, np.array([7, 0, 3]))
    assert reader.in_memory
    assert torch.equal(inputs, torch.stack([windows[index][0] for index in (7, 0, 3)]))
    assert torch.equal(targets, torch.stack([windows[index][1] for index in (7, 0, 3)]))


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (21, {}, "has 21 bytes, which is not a multiple of 2, the size of a uint16 token"),
        (0, {}, "has 0 bytes"),
        (20, {}, "holds 10 tokens, and one window needs 11"),
    ],
)
def test_a_file_of_the_wrong_size_is_named(tmp_path, size, options, message):
    (tmp_path / "a.bin").write_bytes(b"\1" * size)
    with pytest.raises(DataError, match=message) as caught:
        TokenFiles(tmp_path / "a.bin", 10, **options)
    assert "a.bin" in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    tokens = TOKENS.copy()
    tokens[77] = 9999
    TokenFiles(plain(tmp_path / "a.bin", tokens), 10, vocabulary=10_000)
    with pytest.raises(DataError, match=r"a\.bin holds the token 9999 at position 77, and vocabulary=500"):
        TokenFiles(tmp_path / "a.bin", 10, vocabulary=500)


def test_what_cannot_be_tokens_is_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((3, 4), np.float32))
    for files, message in (
        (tmp_path / "no.bin", "does not exist"),
        (tmp_path / "f.npy", r"float32 of shape \(3, 4\)"),
    ):
        with pytest.raises(DataError, match=message):
            TokenFiles(files, 2)
    for arguments, message in (
        ({"length": 0}, "length=0 and stride=0; both must be at least 1"),
        ({"length": 3, "stride": 0}, "length=3 and stride=0; both must be at least 1"),
        ({"length": 3, "dtype": "int8"}, "no dtype 'int8'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TokenFiles(tmp_path / "f.npy", **arguments)
    with pytest.raises(ConfigError, match="empty list"):
        TokenFiles([], 3)
