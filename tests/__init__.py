"""Tests of megablend."""
