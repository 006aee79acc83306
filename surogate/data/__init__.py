"""Data: rows of a file to packed batches of tokens.

sources -> formats -> chat -> tokenise -> flat -> mix -> pack -> dataset -> loader, one module a
step.
"""
