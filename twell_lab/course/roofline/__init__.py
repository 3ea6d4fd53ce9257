"""Notebooks 09 and 11, computed: a layer's operations, bytes and least time; tiles and the pool."""
