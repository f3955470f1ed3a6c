"""Makes larger photos of small ones, to measure photos of the size that cameras' thumbnails and web sets have."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

SIDES = (500, 333)


def enlarged(data: Path, target: Path, *, count: int) -> Path:
    """Writes every n-th photo below ``data``, enlarged to 500 x 333 (or 333 x 500), as JPEGs of quality 90."""
    paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    for path in paths[:: max(1, len(paths) // count)][:count]:
        place = target / path.parent.name / f"{path.stem}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            size = SIDES if image.width >= image.height else SIDES[::-1]
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(place, "JPEG", quality=90)
    return target
