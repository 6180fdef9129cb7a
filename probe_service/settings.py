"""Settings of the service: the environment (``PROBE_…``) read once into a frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["EncodeDtype", "Settings"]

EncodeDtype = Literal["float32", "bfloat16"]


def _default_home() -> Path:
    return Path.home() / ".cache" / "probe-service"


class Settings(BaseSettings):
    """Every field is read from ``PROBE_<NAME>``; docs/settings.md describes them all."""

    model_config = SettingsConfigDict(env_prefix="PROBE_", frozen=True, extra="ignore")

    home: Path = Field(
        default_factory=_default_home, description="Folder of corpora, vectors, jobs and weights."
    )
    database_url: str | None = Field(
        None, description="Job database, e.g. postgresql://…; default: an SQLite file in the home folder."
    )
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that the API listens on.")
    encoder: str | None = Field(
        None, description="Default encoder; if unset, simcse-roberta-large with a GPU and minilm without."
    )
    device: str | None = Field(None, description="torch device; if unset, cuda where there is one, else cpu.")
    encode_dtype: EncodeDtype = Field(
        "float32",
        description="Of the products of matrices in encoders that run here; bfloat16 is faster and less exact.",
    )
    exact_pairs_up_to: int = Field(
        500_000,
        ge=0,
        description="Rows up to which the most similar pairs come from all pairs; beyond, through a FAISS index.",
    )
    sts: Path | None = Field(
        None,
        description="Folder of the seven STS tasks (sts12.jsonl.gz …), by which trials judge trained encoders.",
    )
    allowed_encoders: tuple[str, ...] | None = Field(
        None, description="Encoders that requests may name (JSON list); if unset, the known ones only."
    )
    api_keys: tuple[str, ...] = Field((), description="Bearer keys (JSON list); empty: no key is asked.")
    max_upload_bytes: int = Field(2 * 1024**3, ge=1, description="Largest upload; more answers 413.")
    max_inline_bytes: int = Field(32 * 1024**2, ge=1, description="Largest JSON body; more answers 413.")
    max_row_bytes: int = Field(1024**2, ge=1, description="Longest row; a longer one is refused.")
    max_queued_jobs: int = Field(100, ge=1, description="Jobs waiting at most; more answer 429.")
    application_version: str = Field(
        "1", description="Jobs begun under one version are resumed only under it."
    )
    executor_id: str = Field("worker-1", description="Name of this worker, the same after a restart.")

    @property
    def resolved_database_url(self) -> str:
        """The job database's URL: as given, or SQLite in the home folder."""
        return self.database_url or f"sqlite:///{self.home / 'jobs.sqlite'}"
