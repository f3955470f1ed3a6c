"""Downloads, from a server in this process."""

import gzip
import hashlib
import http.server
import io
import pickle
import resource
import shutil
import socket
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.data import CIFAR10, IDX
from lockstep.data.download import PUBLISHED, Archive, download_archive
from lockstep.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 12


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; a number is the status of the answer."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/sets"
        self.files = {}
        self.asked = []
        self.announced = None
        self.arrived, self.released = threading.Event(), threading.Event()
        self.released.set()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.arrived.set()
        self.server.released.wait()
        found = self.server.files.get(self.path.removeprefix("/sets/"), 404)
        if isinstance(found, int):
            self.send_error(found)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.announced or len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def archive_of(content, name="photos.bin"):
    return Archive(f"https://example.org/{name}", len(content), hashlib.sha256(content).hexdigest())


def listed(folder):
    """The names in a folder, without the lock that processes take."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_file_is_downloaded_and_is_not_asked_for_again(server, tmp_path):
    server.files["photos.bin"] = CONTENT
    said = []
    for _ in range(2):
        path = download_archive(archive_of(CONTENT), tmp_path / "a" / "b", mirror=server.url + "/", tell=said.append)
        assert path.read_bytes() == CONTENT
    assert listed(path.parent) == ["photos.bin"]
    assert server.asked == ["/sets/photos.bin"]
    assert [line.rpartition(", ")[2] for line in said[1:]] == [
        "with the published SHA-256.",
        "with the published SHA-256: kept.",
    ]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (CONTENT[:-1] + b"x", "3,072 bytes came"),
        (CONTENT[:-1], "3,071 bytes came"),
        (b"", "0 bytes came"),
        (CONTENT + b"x" * 10_000_000, "more than 3,072 bytes came"),
    ],
)
def test_something_else_is_refused_and_removed(server, tmp_path, sent, message):
    server.files["photos.bin"] = sent
    with pytest.raises(DataError, match=f"photos.bin is not the published file: {message}"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert listed(tmp_path) == []


def test_an_answer_that_is_cut_off_is_refused_and_removed(server, tmp_path):
    server.files["photos.bin"], server.announced = CONTENT[:1000], len(CONTENT)
    with pytest.raises((ConfigError, DataError), match=r"1,000 bytes came|cannot be downloaded"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert listed(tmp_path) == []


@pytest.mark.parametrize(("code", "words"), [(404, "Not Found"), (503, "Service Unavailable")])
def test_an_error_of_the_server_is_named(server, tmp_path, code, words):
    server.files["photos.bin"] = code
    with pytest.raises(ConfigError, match=rf"the server answers {code} \({words}\)"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert listed(tmp_path) == []


def test_a_server_that_says_nothing_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.data.download.TIMEOUT", 0.05)
    server.released.clear()
    with pytest.raises(ConfigError, match="cannot be downloaded: timed out"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert listed(tmp_path) == []


def test_no_server_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot be downloaded: .*refused.* Check the network"):
            download_archive(archive_of(CONTENT), tmp_path, mirror=mirror)
    assert listed(tmp_path) == []


@pytest.mark.parametrize("mirror", ["file:///etc", "ftp://example.org", "example.org", ""])
def test_a_mirror_is_a_web_server(tmp_path, mirror):
    with pytest.raises(ConfigError, match="is not the address of a web server"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=mirror)


def test_another_file_of_the_name_is_left_as_it_is(server, tmp_path):
    """The files of Fashion-MNIST have the names of MNIST's."""
    (tmp_path / "photos.bin").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="is another file than the published one"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert (tmp_path / "photos.bin").read_bytes() == b"mine" and not server.asked


def test_a_folder_that_cannot_be_made_or_written_to_is_named(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Cannot write to .*/file/folder: Not a directory"):
        download_archive(archive_of(CONTENT), tmp_path / "file" / "folder", mirror=server.url)
    with pytest.raises(ConfigError, match="Cannot write to /proc"):
        download_archive(archive_of(CONTENT), Path("/proc"), mirror=server.url)
    assert not server.asked


def test_too_little_room_is_found_before(server, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 6000, 3000))
    with pytest.raises(ConfigError, match=r"photos.bin takes 3.07 kB, and .* has 3 kB free"):
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url)
    assert not server.asked and listed(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(server, tmp_path):
    content = CONTENT * 1000
    server.files["photos.bin"] = content
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"photos.bin cannot be written: .*\. Make room"):
            download_archive(archive_of(content), tmp_path, mirror=server.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert listed(tmp_path) == []


def test_one_of_two_downloads_and_the_other_waits(server, tmp_path):
    server.files["photos.bin"] = CONTENT
    server.released.clear()
    waits, said = threading.Event(), []

    def told(words):
        said.append(words)
        if "waiting" in words:
            waits.set()

    def get():
        download_archive(archive_of(CONTENT), tmp_path, mirror=server.url, tell=told)

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert server.arrived.wait(30) and waits.wait(30)
    assert listed(tmp_path) == [".photos.bin.partial"]
    server.released.set()
    for thread in threads:
        thread.join()
    assert server.asked == ["/sets/photos.bin"]
    assert sum("waiting" in words for words in said) == 1 and said[-1].endswith("kept.")
    assert listed(tmp_path) == ["photos.bin"]


def test_what_a_killed_download_left_does_not_matter(server, tmp_path):
    server.files["photos.bin"] = CONTENT
    (tmp_path / ".photos.bin.partial").write_bytes(b"x" * 10_000)
    assert download_archive(archive_of(CONTENT), tmp_path, mirror=server.url).read_bytes() == CONTENT
    assert listed(tmp_path) == ["photos.bin"]


def test_the_published_sets_are_those_that_torchvision_knows(torchvision):
    datasets = torchvision.datasets
    assert [archive.url for archive in PUBLISHED["cifar10"]] == [datasets.CIFAR10.url]
    assert [archive.name for archive in PUBLISHED["mnist"]] == [name for name, _ in datasets.MNIST.resources]
    for archive in (archive for archives in PUBLISHED.values() for archive in archives):
        assert archive.url.startswith("https://") and len(bytes.fromhex(archive.sha256)) == 32


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return gzip.compress(header + array.tobytes())


def serve(server, monkeypatch, name, contents):
    """Publishes files of ours in place of a set's."""
    server.files |= {archive.name: content for archive, content in zip(PUBLISHED[name], contents)}
    archives = [archive_of(server.files[archive.name], archive.name) for archive in PUBLISHED[name]]
    monkeypatch.setitem(PUBLISHED, name, tuple(archives))


def test_the_command_downloads_mnist_for_idx(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, labels = np.arange(2 * 28 * 28).reshape(2, 28, 28).astype(np.uint8), np.arange(2).astype(np.uint8)
    serve(server, monkeypatch, "mnist", [idx(array) for array in (images, labels, images[:1], labels[:1])])
    assert main(["download", "mnist", "--mirror", server.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Train on it: lockstep train mnist --data mnist"
    assert len(IDX("mnist")) == 2 and len(IDX("mnist", "validation")) == 1


def test_the_command_downloads_cifar10_for_cifar10(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
            content = pickle.dumps({"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [0, 1]}, protocol=2)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    serve(server, monkeypatch, "cifar10", [file.getvalue()])
    assert main(["download", "cifar10", "--to", "my sets", "--mirror", server.url]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Train on it: lockstep train cifar10 --data 'my sets/cifar-10-python.tar.gz'"
    assert len(CIFAR10("my sets/cifar-10-python.tar.gz", images_per_file=None)) == 10


def test_the_command_names_an_unknown_set(capsys):
    assert main(["download", "cifar"]) == 2
    assert "There is no published set 'cifar'. Did you mean 'cifar10'?" in capsys.readouterr().err


def test_only_the_main_process_downloads(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["download", "mnist", "--to", str(tmp_path / "a"), "--mirror", server.url]) == 0
    assert capsys.readouterr().out == "Rank 1 downloads nothing: rank 0 does.\n"
    assert not server.asked and not (tmp_path / "a").exists()
