"""Durable jobs: a light client for the API, and the worker that runs them."""
