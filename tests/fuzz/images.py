"""Damaged photos, archives, published data files and files of weights."""

import contextlib
import gzip
import io
import pickle
import shutil
import struct
import tarfile

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from tests.fuzz.damage import damaged_bytes
from torch import nn

from lockstep.data import CIFAR10, IDX, CenterCrop, ImageFolder
from lockstep.data.reader import SampleReader
from lockstep.models import load_weights

SIZE = 16
FIRST = np.array([0])


def _pixels(shape):
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def _encoded(image, form, **settings):
    stream = io.BytesIO()
    image.save(stream, form, **settings)
    return stream.getvalue()


def photos():
    """File name -> content, one of each kind that is read."""
    rgb, grey = Image.fromarray(_pixels((24, 40, 3))), Image.fromarray(_pixels((24, 40)))
    exif = Image.Exif()
    exif[0x0112] = 6
    second = Image.fromarray(_pixels((24, 40)) // 2)
    return {
        "plain.jpg": _encoded(rgb, "JPEG", exif=exif),
        "progressive.jpg": _encoded(rgb, "JPEG", progressive=True),
        "cmyk.jpg": _encoded(rgb.convert("CMYK"), "JPEG"),
        "grey.png": _encoded(grey, "PNG"),
        "deep.png": _encoded(Image.fromarray(_pixels((24, 40)).astype(np.uint16) * 257), "PNG"),
        "palette.png": _encoded(rgb.convert("P"), "PNG", transparency=3),
        "animated.gif": _encoded(grey, "GIF", save_all=True, append_images=[second]),
        "lossy.webp": _encoded(rgb, "WEBP"),
        "packed.tif": _encoded(rgb, "TIFF", compression="tiff_lzw"),
        "bare.bmp": _encoded(rgb, "BMP"),
        "bare.ppm": _encoded(rgb, "PPM"),
    }


def odd_photos():
    """Photos in every format that Pillow writes, whatever it is, named ``.jpg``."""
    Image.init()
    rgb, found = Image.fromarray(_pixels((32, 32, 3))), {}
    for form in sorted(set(Image.SAVE) - {"IM"}):  # which is deprecated
        for mode in ("RGB", "L", "P", "1"):
            with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
                found[f"{form}.jpg"] = _encoded(rgb.convert(mode), form)
                break
    return found


def _idx(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def _batch(images=4):
    content = {"data": _pixels((images, 3072)), "labels": list(range(images)), "batch_label": "a batch"}
    return pickle.dumps(content, protocol=2)


def _archive(mode):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name in [f"data_batch_{number}" for number in range(1, 6)]:
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(_batch())
            archive.addfile(entry, io.BytesIO(_batch()))
    return stream.getvalue()


def _model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def weights():
    """The weights of a small model in both formats that are read."""
    torch.manual_seed(0)
    state, stream = _model().state_dict(), io.BytesIO()
    torch.save(state, stream)
    return {"weights.pth": stream.getvalue(), "weights.safetensors": safetensors.torch.save(state)}


class Attempt:
    """Damages one of the sound files and reads it as a run would."""

    def __init__(self, *, odd=False):
        """``odd``: photos in all formats only."""
        if odd:
            self.kinds = [(self._photo, odd_photos())]
            return
        archives = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz", ".tar.bz2": "w:bz2"}
        self.kinds = [
            (self._photo, photos()),
            (self._cifar_archive, {f"cifar{end}": _archive(mode) for end, mode in archives.items()}),
            (self._cifar_batch, {"data_batch_1": _batch(), "data_batch_1.bin": _pixels((2, 3073)).tobytes()}),
            (self._idx, {"images": _idx(_pixels((4, 6, 5))), "labels": _idx(np.arange(4, dtype=np.uint8))}),
            (self._weights, weights()),
            (self._cifar_repacked, {"cifar.tar.gz": _archive("w")}),
        ]

    def __call__(self, rng, folder):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        read, files = self.kinds[rng.choice((0, 0, 0, 0, 1, 2, 3, 4, 5)) % len(self.kinds)]
        name = rng.choice(sorted(files))
        return read(folder, name, damaged_bytes(files[name], rng), rng)

    def _photo(self, folder, name, content, rng):
        (folder / "a").mkdir()
        (folder / "a" / name).write_bytes(content)
        pictures, labels = SampleReader(ImageFolder(folder, transform=CenterCrop(SIZE)), seed=0).read(0, FIRST)
        assert pictures.shape == (1, 3, SIZE, SIZE) and labels.tolist() == [0]
        return "a photo"

    def _cifar_archive(self, folder, name, content, rng):
        (folder / name).write_bytes(content)
        return self._opened(CIFAR10(folder / name, images_per_file=4))

    def _cifar_repacked(self, folder, name, content, rng):
        """Damaged before it was compressed, so that no checksum tells."""
        (folder / name).write_bytes(gzip.compress(content))
        return self._opened(CIFAR10(folder / name, images_per_file=None))

    def _cifar_batch(self, folder, name, content, rng):
        for number in range(1, 6):
            (folder / name.replace("1", str(number))).write_bytes(content)
        return self._opened(CIFAR10(folder, images_per_file=None))

    def _idx(self, folder, name, content, rng):
        sound = dict(self.kinds[3][1]) | {name: content}
        for what, dims in (("images", 3), ("labels", 1)):
            packed = rng.random() < 0.5
            path = folder / f"train-{what}-idx{dims}-ubyte{'.gz' if packed else ''}"
            plain = sound[what]
            path.write_bytes(damaged_bytes(gzip.compress(plain), rng) if packed else plain)
        return self._opened(IDX(folder))

    @staticmethod
    def _opened(dataset):
        pictures, labels = SampleReader(dataset, seed=0).read(0, FIRST)
        assert pictures.dtype == torch.uint8 and len(pictures) == len(labels) == 1
        return "data"

    @staticmethod
    def _weights(folder, name, content, rng):
        (folder / name).write_bytes(content)
        load_weights(_model(), folder / name)
        return "weights"
