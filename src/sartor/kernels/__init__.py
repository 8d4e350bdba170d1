"""Many clients' convolutions, products, norms, attention and shuffles as single kernels; what a device has.

Imports nothing of Sartor.
"""
