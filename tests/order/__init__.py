"""Tests of order."""
