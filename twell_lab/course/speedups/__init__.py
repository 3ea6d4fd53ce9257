"""The workshop "measured speedups": how a layer's speedup becomes a model's, recorded and measured here."""
