"""Low-rank adapters: which of A and B is trained, and which is shared."""
