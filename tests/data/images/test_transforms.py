import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lockstep.data import Cut, RandomResizedCrop, Resize
from lockstep.data.images.decoding import MAX_PIXELS
from lockstep.data.images.transforms import decode_into, decode_rgb
from lockstep.errors import DataError


def photo(width=60, height=40, seed=0):
    """A smooth picture, whose colours survive compression."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray(np.stack([255 * x, 255 * y, 127 + 120 * np.sin(9 * x * y + seed)], axis=2).astype(np.uint8))


def stored(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def difference(a, b):
    return np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max()


class Fixed:
    """Cuts what it is told."""

    draws = 0

    def __init__(self, cut, size):
        self._cut, self.size = cut, size

    def cut(self, width, height, uniforms):
        return self._cut(width, height) if callable(self._cut) else self._cut


def decoded(source, cut, size):
    out = torch.empty(3, size, size, dtype=torch.uint8)
    decode_into(source, Fixed(cut, size), np.zeros(0), out)
    return out.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("box", [(5, 3, 45, 33), (0, 0, 60, 40), (10, 10, 13, 40)])
def test_cut_and_resized_as_pillow_does_within_one_grey_level(box, flip):
    wanted = photo().crop(box).resize((24, 24), Image.Resampling.BILINEAR)
    if flip:
        wanted = wanted.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert difference(decoded(stored(photo()), Cut(box, (24, 24), flip=flip), 24), wanted) <= 1


def test_a_part_of_the_right_size_is_not_touched():
    got = decoded(stored(photo()), Cut((4, 6, 28, 30), (24, 24)), 24)
    assert difference(got, photo().crop((4, 6, 28, 30))) == 0


def test_the_window_is_cut_after_resizing():
    got = decoded(stored(photo()), Cut((0, 0, 60, 40), (32, 48), offset=(4, 12)), 24)
    wanted = photo().resize((48, 32), Image.Resampling.BILINEAR).crop((12, 4, 36, 28))
    assert difference(got, wanted) <= 1


def test_a_large_jpeg_is_decoded_small_and_looks_the_same():
    source = stored(photo(1200, 800), "JPEG", quality=95)
    box = (100, 60, 1000, 780)
    wanted = Image.open(io.BytesIO(source)).crop(box).resize((96, 96), Image.Resampling.BILINEAR)
    got = decoded(source, Cut(box, (96, 96)), 96)
    assert difference(got, wanted) <= 6
    assert np.abs(got.astype(int) - np.asarray(wanted).astype(int)).mean() < 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_before_they_are_cut(orientation):
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    lying = photo().transpose(turns[orientation]) if orientation > 1 else photo()
    exif = Image.Exif()
    exif[0x0112] = orientation
    source = stored(lying, "JPEG", quality=97, subsampling=0, exif=exif)
    whole = decode_rgb(source)
    assert whole.size == (60, 40) and difference(whole, photo()) <= 12
    got = decoded(source, lambda width, height: Cut((8, 4, width - 8, height - 4), (32, 44)), 32)
    assert difference(got, photo().crop((8, 4, 52, 36)).crop((0, 0, 32, 32))) <= 12


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_a_transform_that_turns_photos_by_their_exif_does_not_turn_them_again(kind):
    """With a cache of decoded photos, or simplejpeg, it finds no EXIF either: all had to train on the same bits."""
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = decode_rgb(stored(photo(), kind, exif=exif))
    assert whole.size == (40, 60) and not whole.info
    assert np.array_equal(ImageOps.exif_transpose(whole), whole)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_an_unreadable_orientation_counts_as_none():
    source = stored(photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode_rgb(source).size == (60, 40)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGBA", "LA", "YCbCr", "I;16"])
@pytest.mark.fault("M9")
def test_every_mode_becomes_rgb(mode):
    grey = photo().convert("L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
        wanted, kind = grey.convert("RGB"), "PNG"
    else:
        image = photo().convert(mode)
        wanted, kind = image.convert("RGB"), "TIFF" if mode in {"CMYK", "YCbCr"} else "PNG"
    got = decode_rgb(stored(image, kind))
    assert got.mode == "RGB" and difference(got, wanted) <= 1


@pytest.mark.fault("M9")
def test_a_palette_with_transparency_is_read_without_a_warning():
    image = photo().convert("P")
    got = decode_rgb(stored(image, transparency=bytes(range(256))))
    assert difference(got, image.convert("RGB")) == 0


@pytest.mark.fault("M9")
def test_the_first_picture_of_an_animation_is_read():
    frames = [photo(seed=number).convert("P") for number in range(3)]
    source = stored(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert difference(decode_rgb(source), frames[0].convert("RGB")) == 0


@pytest.mark.fault("M9")
def test_pixels_of_unknown_range_are_refused():
    with pytest.raises(DataError, match="mode F, whose range of values is unknown"):
        decode_rgb(stored(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


def test_a_truncated_jpeg_is_an_error():
    source = stored(photo(300, 200), "JPEG", quality=95)
    with pytest.raises(OSError, match="truncated"):
        decode_rgb(source[: len(source) // 2])
    with pytest.raises(OSError, match="truncated"):
        decoded(source[: len(source) // 2], Cut((0, 0, 40, 40), (24, 24)), 24)


@pytest.mark.parametrize("source", [b"", b"not a photo", b"\xff\xd8\xff"])
def test_a_file_that_is_no_photo_is_an_error(source):
    with pytest.raises(OSError):
        decode_rgb(source)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.fault("M9")
def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    source = bytearray(stored(Image.new("1", (8, 8)), "BMP"))
    width = 12_000
    source[18:26] = width.to_bytes(4, "little") + (MAX_PIXELS // width + 1).to_bytes(4, "little")
    with pytest.raises(DataError, match=r"12000 x 7457 pixels, more than the 89,478,485"):
        decode_rgb(bytes(source))


def test_random_parts_of_a_file_are_those_of_its_bytes(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(stored(photo(), "JPEG"))
    transform = RandomResizedCrop(16)
    out = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    uniforms = np.linspace(0, 0.9, transform.draws)
    decode_into(path, transform, uniforms, out[0])
    decode_into(path.read_bytes(), transform, uniforms, out[1])
    assert torch.equal(out[0], out[1]) and out[0].any()
    decode_into(path, Resize(16), uniforms, out[1])
    assert not torch.equal(out[0], out[1])
