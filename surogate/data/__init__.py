"""Data: rows of a file to packed batches of tokens.

sources -> formats -> chat -> tokenise -> pack -> dataset -> loader, one module a step.
"""
