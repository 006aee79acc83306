"""Runs the CUDA sources of kernels/cuda on the host, so that tests need no card.

``launch.emulated()`` sends every kernel launch here for as long as the context lasts.
"""
