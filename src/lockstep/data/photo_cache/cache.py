"""Opens the file of decoded photos that belongs to a set of photos, and makes it where there is none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.decoding import Photo, open_photo
from lockstep.data.image_transforms import ImageTransform, Uniforms
from lockstep.data.images import cut_into
from lockstep.data.photo_cache.file_lock import lock_file
from lockstep.data.photo_cache.filling import content_digest, fill, states
from lockstep.data.photo_cache.forms import Form, KeptPhoto, Row, WholePhotos, form_for
from lockstep.data.photo_cache.record_file import RecordFile
from lockstep.errors import ConfigError

Tell = Callable[[int, int], None]
"""Called with the number of photos that are done and of all, also while another process decodes them: (0, all)."""

_VERSION = 1


class PhotoCache:
    """The decoded photos of a set, by number.

    Args:
        records: the file.
        form: what it keeps.
        root: folder of the photos.
        paths: of the photos, below it.
    """

    def __init__(self, records: RecordFile, form: Form, root: Path, paths: Sequence[str]) -> None:
        self.file = records.path
        self._records, self._form, self._root, self._paths = records, form, root, paths
        self._rows = records.arrays["rows"]

    def photo(self, index: int) -> Photo:
        """The whole photo; from its file where that is not kept."""
        row = self._row(index)
        if row[2] and isinstance(self._form, WholePhotos):
            return KeptPhoto(self._records[index], row)
        return open_photo(self._root / self._paths[index])

    def cut_into(self, index: int, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
        """Makes the picture that ``transform`` cuts out of a photo, as ``decode_into`` makes it of the file."""
        row = self._row(index)
        if not row[2] or not self._form.cut_into(self._records[index], row, transform, uniforms, out):
            cut_into(open_photo(self._root / self._paths[index]), transform, uniforms, out)

    def _row(self, index: int) -> Row:
        width, height, scales, scalable = self._rows[index].tolist()
        return width, height, scales, scalable


def open_cache(
    root: Path,
    paths: Sequence[str],
    transform: ImageTransform | Callable[[Any], Any],
    folder: Path,
    *,
    workers: int = 0,
    tell: Tell = lambda done, count: None,
) -> PhotoCache:
    """The decoded photos, from the file in ``folder`` that was made of these files with these settings, else a new one.

    One process makes it and others wait. A file is made anew once a photo's content has changed; where only times have,
    the contents are compared.

    Args:
        root: folder of the photos.
        paths: of the photos, below it.
        transform: what is done to them.
        folder: where the file is kept; made where it is absent.
        workers: processes that decode; 0 decodes here.
        tell: see ``Tell``.

    Raises:
        ConfigError: the folder cannot be written to, or has not enough room.
    """
    form = form_for(transform)
    file = folder / f"{root.name or 'photos'}-{_key(paths, form)}.photos"
    records = _current(file, root, paths)
    if records is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error}. Give data.cache another folder.") from error
        with lock_file(file.with_suffix(".lock"), lambda: tell(0, len(paths))):
            records = _current(file, root, paths)
            if records is None:
                fill(file, root, paths, form, workers=workers, tell=tell)
                records = RecordFile(file)
    return PhotoCache(records, form, root, paths)


def default_folder() -> Path:
    """The user's folder for things that can be made again, after the XDG rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


def _key(paths: Sequence[str], form: Form) -> str:
    settings = json.dumps([_VERSION, form.settings(), list(paths)], sort_keys=True)
    return hashlib.blake2b(settings.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _current(file: Path, root: Path, paths: Sequence[str]) -> RecordFile | None:
    """The file, if it is whole and was made of what the photos hold now."""
    try:
        records = RecordFile(file)
    except (OSError, ValueError):
        return None
    noted, found = records.arrays["states"], states(root, paths)
    if noted.shape != found.shape or not np.array_equal(noted[:, 0], found[:, 0]):
        return None
    for index in np.flatnonzero(noted[:, 1] != found[:, 1]).tolist():
        try:
            content = (root / paths[index]).read_bytes()
        except OSError:
            return None
        if not np.array_equal(content_digest(content), records.arrays["digests"][index]):
            return None
    return records
