"""Methods that do not wait for everyone."""
