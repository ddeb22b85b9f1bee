"""Operations that report on runs and change nothing: describe, show, find, diff, export."""
