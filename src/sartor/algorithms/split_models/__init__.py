"""Body and head, features: part of the model is shared, part is the client's.

Imports the server's mathematics and the references.
"""
