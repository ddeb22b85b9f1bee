"""The process that owns a mirror's folder: the only one that writes it and reads the source."""
