"""Similarity-weighted personal models, synchronous and asynchronous: SPFL, LGA, PLGA."""
