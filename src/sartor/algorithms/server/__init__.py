"""The server's mathematics that several methods share."""
