"""A manifest for files that were changed after they had been written."""

from lockstep.checkpoint.manifest import MANIFEST, FileEntry, Manifest


def manifest_of(folder, step):
    """The bytes of a manifest that fits the files in ``folder``."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    return Manifest(step, {name: FileEntry.of(folder / name) for name in names}).to_bytes()
