"""The node process, which owns a mirror's folder. It is the only process that writes to the folder
and reads the sources."""
