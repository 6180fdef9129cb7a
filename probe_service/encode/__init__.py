"""Encoders: text to unit vectors."""
