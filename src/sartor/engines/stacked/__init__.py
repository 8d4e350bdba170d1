"""The fast engine: a step of many clients at once, traced once, scheduled in lanes, captured on CUDA.

Imports what engines may, and the loop engine, to which it leaves what cannot be stacked.
"""
