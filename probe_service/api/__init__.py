"""The HTTP service: thin routes over the job client and the store. Never loads torch, faiss or the probe."""

from probe_service.api.app import create_app
from probe_service.api.server import run_server

__all__ = ["create_app", "run_server"]
