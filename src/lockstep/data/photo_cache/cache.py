"""Opens the file of decoded photos that belongs to a set of photos, and makes it where there is none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.decoding import Photo, open_photo
from lockstep.data.image_transforms import ImageTransform, Uniforms
from lockstep.data.images import cut_into
from lockstep.data.photo_cache.file_lock import lock_file
from lockstep.data.photo_cache.filling import content_digest, fill
from lockstep.data.photo_cache.forms import Form, KeptPhoto, Row, WholePhotos, form_for
from lockstep.data.photo_cache.record_file import RecordFile
from lockstep.data.photo_cache.sources import Photos
from lockstep.errors import ConfigError

Tell = Callable[[int, int], None]
"""Called with the number of photos that are done and of all, also while another process decodes them: (0, all)."""

_VERSION = 1


class PhotoCache:
    """The decoded photos of a set, by number.

    Args:
        records: the file.
        form: what it keeps.
        photos: where those are found that are not kept.
    """

    def __init__(self, records: RecordFile, form: Form, photos: Photos) -> None:
        self.file = records.path
        self._records, self._form, self._photos = records, form, photos
        self._rows = records.arrays["rows"]

    def photo(self, index: int) -> Photo:
        """The whole photo; from its file where that is not kept."""
        row = self._row(index)
        if row[2] and isinstance(self._form, WholePhotos):
            return KeptPhoto(self._records[index], row)
        return open_photo(self._photos.source(index))

    def cut_into(self, index: int, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
        """Makes the picture that ``transform`` cuts out of a photo, as ``decode_into`` makes it of the file."""
        row = self._row(index)
        if not row[2] or not self._form.cut_into(self._records[index], row, transform, uniforms, out):
            cut_into(open_photo(self._photos.source(index)), transform, uniforms, out)

    def _row(self, index: int) -> Row:
        width, height, scales, scalable = self._rows[index].tolist()
        return width, height, scales, scalable


def open_cache(
    photos: Photos,
    transform: ImageTransform | Callable[[Any], Any],
    folder: Path,
    *,
    workers: int = 0,
    tell: Tell = lambda done, count: None,
) -> PhotoCache:
    """The decoded photos, from the file in ``folder`` that was made of them with these settings, else a new one.

    One process makes it and others wait. A file is made anew once a photo's content has changed; where only times have,
    the contents are compared.

    Args:
        photos: where they are found.
        transform: what is done to them.
        folder: where the file is kept; made where it is absent.
        workers: processes that decode; 0 decodes here.
        tell: see ``Tell``.

    Raises:
        ConfigError: the folder cannot be written to, or has not enough room.
    """
    form = form_for(transform)
    file = folder / f"{photos.name}-{_key(photos, form)}.photos"
    records = _current(file, photos)
    if records is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error}. Give data.cache another folder.") from error
        with lock_file(file.with_suffix(".lock"), lambda: tell(0, len(photos))):
            records = _current(file, photos)
            if records is None:
                fill(file, photos, form, workers=workers, tell=tell)
                records = RecordFile(file)
    return PhotoCache(records, form, photos)


def default_folder() -> Path:
    """The user's folder for things that can be made again, after the XDG rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


def _key(photos: Photos, form: Form) -> str:
    settings = json.dumps([_VERSION, form.settings(), photos.identity()], sort_keys=True)
    return hashlib.blake2b(settings.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _current(file: Path, photos: Photos) -> RecordFile | None:
    """The file, if it is whole and was made of what the photos hold now."""
    try:
        records = RecordFile(file)
    except (OSError, ValueError):
        return None
    noted, found = records.arrays["states"], photos.states()
    if noted.shape != found.shape or not np.array_equal(noted[:, 0], found[:, 0]):
        return None
    for index in np.flatnonzero(noted[:, 1] != found[:, 1]).tolist():
        try:
            content = photos.content(index)
        except Exception:  # as when it was decoded: nothing of it is kept
            content = b""
        if not np.array_equal(content_digest(content), records.arrays["digests"][index]):
            return None
    return records
