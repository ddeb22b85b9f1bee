"""Nodes that read from one another, so that each byte leaves the source once. Needs aiohttp; is
imported only where `nodes` is set.

signing   who may ask, and whose answer it is: a shared secret, or certificates
"""
