"""Tests of exact."""
