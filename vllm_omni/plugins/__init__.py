"""Accelerators of other packages: each is loaded when a request asks for it, and not before."""
