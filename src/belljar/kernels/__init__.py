"""Kernels: what runs cells and keeps variables between them."""
