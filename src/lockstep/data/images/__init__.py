"""Images: found in folders, decoded, cut, cached, and held in arrays."""
