"""What users call: build, open, describe, show, verify."""
