"""Codes, statuses and the translation of validation errors."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from probe_service.errors import (
    CorpusError,
    EncoderError,
    InputError,
    JobError,
    ProbeError,
    RequestError,
    ServiceError,
)
from probe_service.problems import (
    error_from_json,
    error_to_json,
    http_status,
    problem_of,
    translate_validation_error,
)
from probe_service.schemas import ProbeRequest, ProbeSubmission


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CorpusError("corpus_bad_line", "m"), 422),
        (RequestError("anything_new", "m"), 422),
        (RequestError("corpus_not_found", "m"), 404),
        (EncoderError("encoder_not_allowed", "m"), 422),
        (JobError("job_not_found", "m"), 404),
        (JobError("job_not_ready", "m"), 409),
        (JobError("idempotency_conflict", "m"), 409),
        (JobError("audit_not_found", "m"), 404),
        (JobError("audit_exists", "m"), 409),
        (InputError("audit_labels_incomplete", "m"), 409),
        (InputError("audit_labels_foreign", "m"), 422),
        (JobError("worker_out_of_memory", "m"), 500),
        (ServiceError("payload_too_large", "m"), 413),
        (ServiceError("media_type_unsupported", "m"), 415),
        (ServiceError("queue_full", "m"), 429),
        (ServiceError("unauthorized", "m"), 401),
        (ServiceError("storage_failed", "m"), 503),
        (ServiceError("anything_new", "m"), 500),
    ],
)
def test_every_code_has_its_status(error, status):
    assert http_status(error) == status
    assert problem_of(error).status == status


def test_a_problem_says_what_where_and_how_often():
    error = CorpusError("corpus_bad_line", "Row 7 is no JSON.", row=7, column="text", count=3)
    assert problem_of(error, "/v1/probes/x").model_dump() == {
        "type": "urn:probe-service:error:corpus_bad_line",
        "title": "Unprocessable input",
        "status": 422,
        "detail": "Row 7 is no JSON.",
        "code": "corpus_bad_line",
        "row": 7,
        "column": "text",
        "count": 3,
        "instance": "/v1/probes/x",
    }


@pytest.mark.parametrize(
    "kind", [CorpusError, EncoderError, JobError, RequestError, ServiceError, ProbeError]
)
def test_an_error_survives_the_job_database(kind):
    error = kind("some_code", "Some message.", row=4, count=9)
    revived = error_from_json(error_to_json(error))
    assert type(revived) is kind
    assert revived.to_dict() == error.to_dict()


@pytest.mark.parametrize(
    ("request_fields", "code", "column"),
    [
        ({"temperature": 0}, "temperature_not_positive", "temperature"),
        ({"temperature": -0.05}, "temperature_not_positive", "temperature"),
        ({"temperature": "warm"}, "request_invalid", "temperature"),
        ({"batch_sizes": [16, 1]}, "batch_size_too_small", "batch_sizes"),
        ({"batch_sizes": []}, "request_invalid", "batch_sizes"),
        ({"num_repeats": 1}, "request_invalid", "num_repeats"),
        ({"corpus": {"columns": {"txt": "a"}}}, "request_invalid", "corpus.columns.txt"),
    ],
)
def test_validation_errors_get_stable_codes_and_the_path(request_fields, code, column):
    with pytest.raises(ValidationError) as invalid:
        ProbeRequest.model_validate(request_fields)
    translated = translate_validation_error(invalid.value)
    assert (translated.code, translated.column) == (code, column)
    assert "pydantic" not in str(translated)


def test_a_broken_json_body_has_no_column_but_says_where():
    with pytest.raises(ValidationError) as invalid:
        ProbeSubmission.model_validate_json(b'{"rows": [}')
    translated = translate_validation_error(invalid.value)
    assert translated.code == "request_invalid"
    assert translated.column is None
    assert "line 1 column 11" in translated.message
