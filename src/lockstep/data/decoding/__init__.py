"""Decodes photos: any mode, upright, in 8-bit RGB, at a whole or a reduced scale."""

from lockstep.data.decoding.choice import jpeg_decoder, open_photo, pixels_digest
from lockstep.data.decoding.photo import MAX_PIXELS, Photo, reduced, reduction
from lockstep.data.decoding.reading import decoded_as

__all__ = [
    "MAX_PIXELS",
    "Photo",
    "decoded_as",
    "jpeg_decoder",
    "open_photo",
    "pixels_digest",
    "reduced",
    "reduction",
]
