"""From options and their environment twins to a request."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from probe_service.cli_options import corpus_options, request_from
from probe_service.schemas import ProbeRequest


def requested(*arguments: str, **environment: str) -> ProbeRequest:
    """The request that these options make."""
    found: list[ProbeRequest] = []

    @click.command()
    @corpus_options
    def command(**options: object) -> None:
        found.append(request_from(None, options))

    result = CliRunner().invoke(command, arguments, env=environment, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_without_options_the_request_is_the_default():
    assert requested() == ProbeRequest()


def test_options_of_training_reach_the_sampler_and_the_loss():
    request = requested(
        "--sampler", "grouped", "--world-size", "4", "--gather", "--sampler-policy", "round_robin",
        "--within-source", "no_duplicates", "--directions", "query_to_doc,doc_to_query", "--partition-mode",
        "per_direction", "--train-group-size", "3", "--dropout-views", "--training-dtype", "bfloat16",
    )  # fmt: skip
    assert request.model_dump(
        mode="json", include={"sampler", "loss", "dropout_views", "training_dtype"}
    ) == {
        "sampler": {
            "kind": "grouped",
            "world_size": 4,
            "gather": True,
            "policy": "round_robin",
            "within_source": "no_duplicates",
        },
        "loss": {
            "directions": ["query_to_doc", "doc_to_query"],
            "partition_mode": "per_direction",
            "train_group_size": 3,
        },
        "dropout_views": True,
        "training_dtype": "bfloat16",
    }


def test_what_is_not_given_keeps_its_default():
    assert requested("--world-size", "2").sampler == ProbeRequest().sampler.model_copy(
        update={"world_size": 2}
    )
    assert requested("--no-gather").sampler.gather is False


def test_the_environment_gives_them_too():
    request = requested(PROBE_SAMPLER="no_duplicates", PROBE_GATHER="1", PROBE_DIRECTIONS="query_to_query")
    assert (request.sampler.kind, request.sampler.gather, request.loss.directions) == (
        "no_duplicates",
        True,
        ("query_to_query",),
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--directions", "query_to_doc,sideways"),
        ("--sampler", "group_by_label"),
        ("--training-dtype", "int8"),
    ],
)
def test_an_unknown_name_is_bad_usage_that_lists_the_known_ones(option, value):
    with pytest.raises(click.UsageError, match="is not one of"):
        requested(option, value)
