"""Routes of stored corpora."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from probe_service.api.service import ServiceDependency
from probe_service.api.uploads import media_type, receive_upload
from probe_service.errors import ServiceError
from probe_service.schemas import CorpusOptions, Noun, StoredCorpus

__all__ = ["CorpusList", "router"]

router = APIRouter(prefix="/v1/corpora", tags=["corpora"])

_UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "options": {"$ref": "#/components/schemas/CorpusOptions"},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


class CorpusList(Noun):
    """Stored corpora, newest first."""

    corpora: list[StoredCorpus]


@router.post("", status_code=201, response_model=StoredCorpus, openapi_extra=_UPLOAD_BODY)
async def store_corpus(request: Request, response: Response, service: ServiceDependency) -> StoredCorpus:
    """Store a corpus (multipart: `options`, then `file`) for several probes; equal bytes are stored once."""
    if media_type(request) != "multipart/form-data":
        raise ServiceError(
            "media_type_unsupported", "Send a corpus as multipart/form-data with a part 'file'."
        )
    with service.store.writer() as writer:
        upload = await receive_upload(
            request,
            writer,
            service.settings,
            form_name="options",
            options_of=CorpusOptions.model_validate_json,
        )

        def commit() -> StoredCorpus:
            stored = writer.commit(upload.name, upload.format)
            service.store.keep(stored.id)
            return service.store.get(stored.id)

        stored = await run_in_threadpool(commit)
    response.headers["Location"] = f"/v1/corpora/{stored.id}"
    return stored


@router.get("", response_model=CorpusList)
def list_corpora(service: ServiceDependency) -> CorpusList:
    """List what is stored."""
    return CorpusList(corpora=service.store.list())


@router.get("/{corpus_id}", response_model=StoredCorpus)
def show_corpus(corpus_id: str, service: ServiceDependency) -> StoredCorpus:
    """Show one stored corpus."""
    return service.store.get(corpus_id)


@router.delete("/{corpus_id}", status_code=204)
def delete_corpus(corpus_id: str, service: ServiceDependency) -> None:
    """Delete a stored corpus that no unfinished job reads."""
    service.jobs.delete_corpus(corpus_id)
