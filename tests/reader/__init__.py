"""Tests of reader."""
