"""Contrastive losses and their numerics."""
