"""Datasets that are wanted on a machine whatever job runs: revisions, wants, and what follows from
them. Imported only if they are used."""
