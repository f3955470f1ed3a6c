import io
import types

import numpy as np
import pytest
from PIL import Image

from lockstep.data.images import decoding
from lockstep.data.images.decoding import PillowPhoto, jpeg_decoder, open_photo, pixels_digest


class Decoder(types.SimpleNamespace):
    """Stands for simplejpeg; decodes with Pillow and adds ``error`` to one pixel."""

    __version__ = "0"

    def decode_jpeg_header(self, source):
        width, height = Image.open(io.BytesIO(source)).size
        return height, width, "YCbCr", "420"

    def decode_jpeg(self, source, min_width=0, min_height=0):
        image = Image.open(io.BytesIO(source))
        if min_width:
            factor = round(image.width / min_width)
            image.draft(None, (image.width // factor, image.height // factor))
        pixels = np.array(image.convert("RGB"))
        pixels[0, 0, 0] ^= self.error
        return pixels


def test_a_decoder_of_other_bits_is_not_used():
    assert decoding.agrees_with_pillow(Decoder(error=0))
    assert not decoding.agrees_with_pillow(Decoder(error=1))


def test_a_decoder_that_cannot_decode_is_not_used():
    decoder = Decoder(error=0)
    decoder.decode_jpeg_header = lambda source: (1, 1, "CMYK", "444")
    assert not decoding.agrees_with_pillow(decoder)


def test_without_another_decoder_pillow_reads_all(monkeypatch):
    monkeypatch.setattr(decoding, "turbo_module", lambda: None)
    file = io.BytesIO()
    Image.new("RGB", (20, 30), (200, 100, 50)).save(file, "JPEG")
    assert isinstance(open_photo(file.getvalue()), PillowPhoto)
    assert jpeg_decoder().startswith("Pillow ") and "libjpeg" in jpeg_decoder()


def test_the_decoder_is_named_with_its_version(monkeypatch):
    monkeypatch.setattr(decoding, "turbo_module", lambda: Decoder(error=0))
    assert jpeg_decoder().startswith("simplejpeg 0, else Pillow ")


def test_the_digest_follows_the_pixels(monkeypatch):
    here = pixels_digest()
    assert len(here) == 16 and pixels_digest.__wrapped__() == here
    pixels = PillowPhoto.pixels
    monkeypatch.setattr(PillowPhoto, "pixels", lambda self, factor=1: pixels(self, factor) ^ np.uint8(1))
    assert pixels_digest.__wrapped__() != here


def test_the_module_is_looked_for_once(monkeypatch):
    asked = []

    def nothing(name):
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(decoding, "import_module", nothing)
    fresh = decoding.cache(decoding.turbo_module.__wrapped__)
    assert fresh() is None and fresh() is None and asked == ["simplejpeg"]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_photo(tmp_path / "absent.jpg")
