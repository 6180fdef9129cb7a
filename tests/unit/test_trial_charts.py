"""Charts of a trial: what is in the report is what is drawn."""

from __future__ import annotations

import pytest

from probe_service import charts
from probe_service.charts import Theme
from probe_service.schemas import Estimate, HeldOutRows, MaskingGain, TrialFigure, TrialReport, TrialRequest
from tests.unit.test_charts import marks


def estimate(value, half=0.01) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half, method="t over 5 seeds")


def figure(loss, size, value, temperature=0.05) -> TrialFigure:
    return TrialFigure(
        loss=loss,
        batch_size=size,
        temperature=temperature,
        learning_rate=0.001,
        num_seeds=5,
        scores={"map": estimate(value), "accuracy": estimate(0.9)},
    )


def report(table, masking=()) -> TrialReport:
    return TrialReport(
        request=TrialRequest(),
        complete=False,
        num_cells=9,
        corpus=None,
        encoder=None,
        training_rows=100,
        training_rows_left_out=0,
        held_out=HeldOutRows(description="rows", rows=10, queries=10, queries_left_out=0),
        protocol=[],
        metric="map",
        before={"map": 0.5},
        tuned=[],
        table=list(table),
        masking=list(masking),
        rank_correlation=None,
        cells=[],
        warnings=[],
    )


LOSSES = ["infonce", "gs_infonce", "gs_infonce_x8", "gs_infonce_control", "flatnce", "oracle_masking"]


@pytest.mark.parametrize("theme", Theme)
def test_every_loss_is_a_line_of_its_own(theme):
    table = [
        figure(loss, size, 0.62 + 0.01 * at + size / 1000)
        for at, loss in enumerate(LOSSES)
        for size in (4, 64)
    ]
    spec = charts.trial_chart(
        report([*table, figure("infonce", 4, 0.1, temperature=0.2)]), theme=theme, width=760
    )
    rows = spec["datasets"]["scores"]
    assert {(row["series"], row["batch_size"], row["value"]) for row in rows} == {
        (each.loss, each.batch_size, each.scores["map"].value) for each in table
    }
    assert all(row["low"] < row["value"] < row["high"] for row in rows)
    lines = marks(spec, "line")
    assert len({(line["stroke"], tuple(line.get("strokeDash", ()))) for line in lines}) == len(LOSSES)
    # The axis spans the values, not all from 0 to 1: .62 is not near the lower edge's distance from 0.
    heights = [point["y"] for point in marks(spec, "symbol")]
    assert max(heights) - min(heights) > 100
    other = charts.trial_chart(report([*table, figure("infonce", 4, 0.1, 0.2)]), theme=theme, temperature=0.2)
    assert [row["value"] for row in other["datasets"]["scores"]] == [0.1]


def test_a_trial_without_a_cell_can_be_drawn():
    spec = charts.trial_chart(report([]), theme=Theme.LIGHT, width=760)
    assert "Nothing has been measured yet." in spec["description"]
    assert charts.render_svg(charts.masking_chart(report([]), theme=Theme.LIGHT, width=400))


def test_gains_lie_above_their_predicted_share():
    gains = [
        MaskingGain(batch_size=4, temperature=0.05, predicted_share=estimate(0.1, 0), gain=estimate(0.004)),
        MaskingGain(batch_size=256, temperature=0.05, predicted_share=estimate(0.6, 0), gain=estimate(0.04)),
        MaskingGain(batch_size=1024, temperature=0.05, predicted_share=None, gain=estimate(0.05)),
    ]
    spec = charts.masking_chart(report([], gains), theme=Theme.DARK, width=400)
    assert [(row["share"], row["gain"]) for row in spec["datasets"]["gains"]] == [(0.1, 0.004), (0.6, 0.04)]
    points = sorted(marks(spec, "symbol"), key=lambda point: point["x"])
    assert len(points) == 2
    assert points[0]["y"] > points[1]["y"], "a larger gain is drawn higher"
    assert {text["text"] for text in marks(spec, "text")} >= {"N = 4", "N = 256"}
