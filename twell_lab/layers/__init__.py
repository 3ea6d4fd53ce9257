"""The layers of a model: what a feed-forward is, and SparseFFN in its place. May import records, ops and all below."""
