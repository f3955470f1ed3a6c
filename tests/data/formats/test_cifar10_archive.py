import io
import tarfile

import pytest

from lockstep.data.formats import cifar10
from lockstep.data.formats.cifar10 import files_of
from lockstep.errors import DataError


@pytest.mark.fault("M9")
def test_an_archive_that_unpacks_to_more_than_memory_should_take_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "LARGEST", 1000)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name, size in (("a", 600), ("unwanted", 5000), ("b", 600)):
            entry = tarfile.TarInfo(name)
            entry.size = size
            packed.addfile(entry, io.BytesIO(bytes(size)))
    files = files_of(path, lambda name: name.name != "unwanted")
    assert next(files)[0].name == "a"
    with pytest.raises(DataError, match="more than 1,000 bytes \\(reached at 'b'"):
        next(files)
