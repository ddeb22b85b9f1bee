"""Datasets that are wanted on a machine, whichever jobs run: revisions, wants, and what is held for
them. Imported only if they are used."""
