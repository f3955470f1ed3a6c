"""Photos that are decoded once: kept as pixels in one memory-mapped file for all epochs, ranks and workers."""

from lockstep.data.photo_cache.cache import PhotoCache, Tell, default_folder, open_cache
from lockstep.data.photo_cache.sources import FolderPhotos, StoredPhotos

__all__ = ["FolderPhotos", "PhotoCache", "StoredPhotos", "Tell", "default_folder", "open_cache"]
