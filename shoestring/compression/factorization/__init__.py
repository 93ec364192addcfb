"""Factorization: a layer becomes a chain of smaller ones, as an edit of the model."""
