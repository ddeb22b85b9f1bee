"""Tests of object stores and web servers as storages."""
