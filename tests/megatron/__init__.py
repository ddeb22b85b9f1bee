"""Tests of megatron."""
