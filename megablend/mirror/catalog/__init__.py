"""Datasets that are wanted on a machine whichever jobs run: revisions, wants, and what follows from
them. Imported only if they are used."""
