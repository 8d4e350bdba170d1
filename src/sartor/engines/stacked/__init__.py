"""The fast engine: a step of many clients at once, traced once, scheduled in lanes, captured on CUDA."""
