"""What tells of runs and changes nothing: describe, show, find, diff, export."""
