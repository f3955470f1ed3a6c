"""Photos that are decoded once: kept as pixels in one memory-mapped file for all epochs, ranks and workers."""

from lockstep.data.photo_cache.cache import PhotoCache, Tell, default_folder, open_cache

__all__ = ["PhotoCache", "Tell", "default_folder", "open_cache"]
