"""Datasets that are kept on a machine at a user's request, whichever jobs run: their revisions, the
requests (wants), and the data that are held for them. Imported only if there are datasets."""
