import io

import numpy as np
import pytest
from PIL import Image

from lockstep.data.images.decoding import MAX_PIXELS, PillowPhoto, TurboPhoto, open_photo, reduction
from lockstep.errors import DataError

simplejpeg = pytest.importorskip("simplejpeg", reason="simplejpeg, the faster decoder, is not installed")

NOISE = np.random.RandomState(5).randint(0, 256, (99, 131, 3)).astype(np.uint8)


def jpeg(pixels=NOISE, **options):
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


def same_bits(source):
    turbo = TurboPhoto(simplejpeg, source)
    pillow = PillowPhoto(source)
    assert (turbo.width, turbo.height) == (pillow.width, pillow.height)
    possible = [reduction(turbo.width, turbo.height, spare) for spare in range(1, 9)]
    factors = [factor for factor in possible if factor <= min(turbo.width, turbo.height)]
    return all(np.array_equal(turbo.pixels(factor), PillowPhoto(source).pixels(factor)) for factor in factors)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_pixels_are_pillows_at_every_scale(subsampling, progressive):
    assert same_bits(jpeg(subsampling=subsampling, progressive=progressive))


@pytest.mark.parametrize("shape", [(8, 8), (9, 17), (16, 3), (64, 200), (1, 40)])
def test_pixels_are_pillows_at_any_size(shape):
    assert same_bits(jpeg(NOISE[: shape[0], : min(shape[1], 131)]))


def test_grey_photos_and_those_stored_as_rgb_are_pillows():
    assert same_bits(jpeg(Image.fromarray(NOISE).convert("L")))
    assert same_bits(jpeg(keep_rgb=True))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_as_by_pillow(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert same_bits(jpeg(exif=exif))


def test_ordinary_jpegs_are_given_to_turbo_and_others_to_pillow():
    assert isinstance(open_photo(jpeg()), TurboPhoto)
    assert isinstance(open_photo(jpeg(Image.fromarray(NOISE).convert("CMYK"))), PillowPhoto)
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, "PNG")
    assert np.array_equal(open_photo(file.getvalue()).pixels(), NOISE)


def test_pillow_says_what_is_wrong_with_a_truncated_file():
    source = jpeg()
    photo = open_photo(source[: len(source) // 2])
    assert isinstance(photo, TurboPhoto)
    with pytest.raises(OSError, match="truncated"):
        photo.pixels()
    with pytest.raises(OSError, match="Truncated"):
        open_photo(source[:10])


def test_a_decompression_bomb_is_refused_by_its_header():
    source = bytearray(jpeg())
    place = source.index(b"\xff\xc0") + 5
    width = 12_000
    source[place : place + 4] = (MAX_PIXELS // width + 1).to_bytes(2, "big") + width.to_bytes(2, "big")
    with pytest.raises(DataError, match=r"12000 x 7457 pixels"):
        open_photo(bytes(source))


def test_photos_are_cut_alike_by_both(monkeypatch):
    import torch

    from lockstep.data import RandomResizedCrop
    from lockstep.data.images import decoding
    from lockstep.data.images.transforms import decode_into, decode_rgb

    smooth = np.kron(NOISE[:30, :40], np.ones((9, 9, 1), dtype=np.uint8))
    source, transform = jpeg(smooth), RandomResizedCrop(48)
    draws = np.random.RandomState(1).random_sample((20, transform.draws))
    pictures = torch.empty(2, 20, 3, 48, 48, dtype=torch.uint8)
    for number in range(20):
        decode_into(source, transform, draws[number], pictures[0, number])
    whole = decode_rgb(source)
    monkeypatch.setattr(decoding, "turbo_module", lambda: None)
    assert isinstance(open_photo(source), PillowPhoto)
    for number in range(20):
        decode_into(source, transform, draws[number], pictures[1, number])
    assert torch.equal(pictures[0], pictures[1])
    assert np.array_equal(whole, decode_rgb(source))
