"""Chart specifications against the report: values, positions on the drawn picture, colours, and what they load."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from probe_service import charts
from probe_service.charts import Theme
from probe_service.errors import ServiceError
from probe_service.schemas import (
    AuditedShare,
    AuditLabels,
    AuditReport,
    BatchSizeLimit,
    Estimate,
    SharesByTemperature,
)
from tests.unit.report_fixtures import (
    REPORTS,
    all_equal_report,
    certain_report,
    detailed_report,
    full_report,
    harm,
    hostile_report,
    null_ranks_report,
    single_size_report,
)

SVG = "{http://www.w3.org/2000/svg}"


def rows(spec, name, **where):
    return [row for row in spec["datasets"][name] if all(row[key] == value for key, value in where.items())]


def similarity(report, **options):
    return charts.similarity_chart(report.curve, theme=Theme.LIGHT, **options)


def share(report, **options):
    advice = report.advice
    return charts.share_chart(
        report.curve, scan=report.scan, budget=advice.budget, n_max=advice.n_max, theme=Theme.LIGHT, **options
    )


def temperatures(report, **options):
    assert report.shares_by_temperature is not None
    options = {"theme": Theme.LIGHT, "width": 760, **options}
    return charts.temperature_chart(
        report.shares_by_temperature,
        temperature=report.sampling.temperature,
        budget=report.advice.budget,
        **options,
    )


def all_charts(report, theme=Theme.LIGHT, width=760):
    advice = report.advice
    found = {
        "similarity": charts.similarity_chart(report.curve, theme=theme, width=width),
        "share": charts.share_chart(
            report.curve, scan=report.scan, budget=advice.budget, n_max=advice.n_max, theme=theme, width=width
        ),
        "histogram": charts.histogram_chart(
            report.histogram,
            worst_case_similarity=report.evidence.worst_case_similarity,
            theme=theme,
            width=width,
        ),
    }
    if report.shares_by_temperature is not None:
        found["temperature"] = temperatures(report, theme=theme, width=width)
    if report.harm is not None:
        found["sources"] = charts.source_chart(report.harm, theme=theme, width=width)
    return found


def marks(spec, kind):
    """All drawn items of one mark type, from the scene graph that the renderer itself makes."""
    import vl_convert

    found = []

    def walk(node):
        if node.get("marktype") == kind:
            found.extend(node["items"])
        for child in node.get("items", ()):
            walk(child)

    walk(vl_convert.vegalite_to_scenegraph(spec)["scenegraph"])
    return found


# ------------------------------------------------------------------------------------------ values


def audited(*found: Estimate | None, n_max: int | None) -> AuditReport:
    """An audit at 8, 16, … with these estimates."""
    shares = [
        AuditedShare(
            batch_size=8 * 2**at,
            estimate=estimate,
            reason=None if estimate else "few labels",
            effective_labels=80.0,
            known_share=0.0,
            unjudged_share=1.0,
        )
        for at, estimate in enumerate(found)
    ]
    limit = BatchSizeLimit(value=n_max, tested_up_to=16, exceeded=True, reason="as labelled")
    labels = dict.fromkeys(AuditLabels.model_fields, 0) | {"contradictions": []}
    return AuditReport(
        audit="a",
        corpus_sha256="0" * 64,
        encoder="minilm",
        temperature=0.05,
        confidence_level=0.95,
        judges=["person"],
        labels=AuditLabels.model_validate(labels),
        shares=shares,
        n_max=limit,
        verdicts=[],
        warnings=[],
    )


def test_an_audits_chart_has_its_estimates_the_budget_and_the_limit():
    known = Estimate(value=0.1, low=0.05, high=0.19, method="audit")
    spec = charts.audit_chart(audited(known, None, n_max=11), budget=0.2, theme=Theme.LIGHT, width=760)
    (row,) = rows(spec, "share")
    assert [row[key] for key in ("batch_size", "value", "low", "high")] == [8, 0.1, 0.05, 0.19]
    assert rows(spec, "budget") == [{"budget": 0.2}]
    assert rows(spec, "n_max")[0]["n_max"] == 11
    assert "n_max = 11" in [item["text"] for item in marks(spec, "text")]


def test_an_audit_without_any_estimate_draws_no_share():
    spec = charts.audit_chart(audited(None, None, n_max=None), budget=0.2, theme=Theme.DARK, width=760)
    assert rows(spec, "share") == []
    assert "no batch size\nis shown to be safe" in [item["text"] for item in marks(spec, "text")]


def test_similarity_values_are_the_reports():
    report = full_report()
    spec = similarity(report)
    for point in report.curve:
        (mean,) = rows(spec, "similarity", batch_size=point.batch_size, series="top_k_mean")
        assert point.top_k_mean is not None
        assert (mean["value"], mean["low"], mean["high"]) == (
            point.top_k_mean.value,
            point.top_k_mean.low,
            point.top_k_mean.high,
        )
        for rank, estimate in enumerate(point.top_k, start=1):
            (row,) = rows(spec, "similarity", batch_size=point.batch_size, series=f"rank_{rank}")
            assert row["value"] == estimate.value
        for series, estimate in (
            ("false_negatives_masked", point.nulls.false_negatives_masked),
            ("gaussian_matched", point.nulls.gaussian_matched),
            ("isotropic", point.nulls.isotropic),
            ("noise_mean", point.gaussian_similarity.mean),
            ("noise_max", point.gaussian_similarity.max),
        ):
            (row,) = rows(spec, "similarity", batch_size=point.batch_size, series=series)
            assert row["value"] == estimate.value


def test_null_ranks_are_left_out_not_drawn_as_zero():
    spec = similarity(null_ranks_report())
    # A batch of 2 has one pair, one of 3 has three: rank 2 exists from 3 on, rank 4 and the mean from 4 on.
    sizes = {
        series: [row["batch_size"] for row in rows(spec, "similarity", series=series)]
        for series in ("rank_1", "rank_2", "rank_4", "top_k_mean")
    }
    assert sizes == {
        "rank_1": [2, 3, 4, 16, 64],
        "rank_2": [3, 4, 16, 64],
        "rank_4": [4, 16, 64],
        "top_k_mean": [4, 16, 64],
    }


def test_a_value_without_interval_says_why():
    (row,) = rows(similarity(null_ranks_report()), "similarity", batch_size=64, series="top_k_mean")
    assert row["low"] is None
    assert row["interval"] == "none: no interval: N is above a 20th of the encoded rows"


def test_many_ranks_are_thinned_to_six_with_first_and_last():
    spec = similarity(full_report(top_k=12, sizes=(16, 64)))
    series = {row["series"] for row in spec["datasets"]["similarity"]}
    ranks = {int(name.removeprefix("rank_")) for name in series if name.startswith("rank_")}
    assert {1, 12} <= ranks
    assert len(ranks) <= 6


def test_share_line_is_the_scan_and_points_are_the_sizes_asked_for():
    report = full_report()
    spec = share(report)
    assert [
        (row["batch_size"], row["value"], row["high"]) for row in rows(spec, "share", series="share")
    ] == [(point.batch_size, point.estimate.value, point.estimate.high) for point in report.scan]
    assert [row["batch_size"] for row in rows(spec, "share_points", series="share")] == [
        16, 32, 64, 128, 256, 512, 1024,
    ]  # fmt: skip
    assert rows(spec, "share", series="worst_case") == []


def test_incomplete_evidence_shows_the_worst_case_and_says_lower_bound():
    report = certain_report()
    spec = share(report)
    worst = rows(spec, "share", series="worst_case")
    assert [row["value"] for row in worst] == [point.worst_case.value for point in report.scan]
    assert {row["name"] for row in rows(spec, "share", series="share")} == {"known pairs only (lower bound)"}


def test_what_chains_add_is_a_line_and_the_borrowed_curve_a_scenario():
    report = detailed_report()
    spec = share(report, width=760)
    for point in report.curve:
        (inferred,) = rows(spec, "share_points", batch_size=point.batch_size, series="inferred")
        assert (inferred["value"], inferred["low"], inferred["high"]) == (
            point.inferred_share.value,
            point.inferred_share.low,
            point.inferred_share.high,
        )
        (scenario,) = rows(spec, "share_points", batch_size=point.batch_size, series="borrowed")
        assert (scenario["value"], scenario["low"]) == (point.borrowed_share, None)
        assert scenario["name"].startswith("scenario")
        assert scenario["interval"] == "none: a scenario, no estimate"
    grey, ground = "#6e7781", "#ffffff"
    rings = [item for item in marks(spec, "symbol") if item["stroke"] == grey]
    assert [ring["fill"] for ring in rings] == [ground] * 3
    assert not [item for item in marks(spec, "symbol") if item["fill"] == grey]  # no point like a result's
    (line,) = [item for item in marks(spec, "line") if item["stroke"] == grey][:1]
    assert line["strokeDash"] == [1.5, 3]
    # Where there is neither, there is no line.
    assert {row["series"] for row in spec["datasets"]["share"]} == {
        "share", "worst_case", "inferred", "borrowed",
    }  # fmt: skip
    assert {row["series"] for row in share(certain_report())["datasets"]["share"]} == {"share", "worst_case"}


def test_temperatures_have_a_line_for_each_size_and_the_reports_own_is_marked():
    report = detailed_report()
    shares = report.shares_by_temperature
    spec = temperatures(report)
    for at, size in enumerate(shares.batch_sizes):
        for kind, table in (("share", shares.share), ("worst_case", shares.worst_case)):
            drawn = rows(spec, "temperatures", series=f"{kind}_{size}")
            assert {row["temperature"]: row["value"] for row in drawn} == {
                temperature: row[at] for temperature, row in zip(shares.temperatures, table, strict=True)
            }
    # From 0.2 at the left to 0.01 at the right over 760 − 190 pixels.
    upright = [item for item in marks(spec, "rule") if item.get("y") == 0 and item.get("y2") == 320]
    assert [item["x"] for item in upright] == [
        pytest.approx(math.log(0.2 / 0.05) / math.log(20) * 570, abs=0.51)
    ]
    assert "T = 0.05 (this report)" in [item.get("text") for item in marks(spec, "text")]
    # The highest value is 0.54 × 1.29 = 0.70, so that the axis ends at 0.8.
    level = [item for item in marks(spec, "rule") if item.get("x2") == 570 and item.get("strokeDash")]
    assert [item["y"] for item in level] == [pytest.approx((0.8 - 0.2) / 0.8 * 320, abs=0.51)]


def test_of_many_sizes_six_have_a_line_at_other_temperatures():
    sizes = [2**power for power in range(1, 12)]
    shares = SharesByTemperature(
        temperatures=[0.05, 0.1],
        batch_sizes=sizes,
        share=[[size / 4096 for size in sizes], [size / 8192 for size in sizes]],
        worst_case=None,
    )
    spec = charts.temperature_chart(shares, temperature=2.0, budget=0.2, theme=Theme.DARK, width=760)
    assert {row["series"] for row in spec["datasets"]["temperatures"]} == {
        f"share_{size}" for size in (2, 8, 32, 128, 512, 2048)
    }
    # A temperature beyond the table is still within the axis.
    (upright,) = [item for item in marks(spec, "rule") if item.get("y") == 0 and item.get("y2") == 320]
    assert upright["x"] == pytest.approx(0, abs=0.51)


def test_sources_add_up_to_the_share_and_say_how_much_of_each_push_is_false():
    spec = charts.source_chart(detailed_report().harm, theme=Theme.LIGHT, width=760)
    cells = spec["datasets"]["sources"]
    assert len(cells) == 9
    assert sum(cell["false_push_share"] for cell in cells) == pytest.approx(0.03)
    # A ninth of the push each; .02 / 3 of it false within a source, .01 / 6 between two.
    for cell in cells:
        within = cell["anchor_source"] == cell["candidate_source"]
        assert cell["words"] == ("0.06" if within else "0.02")
        assert cell["false_share"] == ("0.0600" if within else "0.0150")
    assert "0.0067 from anchors of chat on candidates of chat" in spec["description"]


def test_small_sources_are_added_up_and_alike_ones_told_apart():
    many = [f"source {number:02}" for number in range(20)]
    whole = harm(["a"], many)
    spec = charts.source_chart(whole, theme=Theme.LIGHT, width=330)
    cells = spec["datasets"]["sources"]
    assert len(cells) == 16 * 16
    assert sum(cell["false_push_share"] for cell in cells) == pytest.approx(0.03)
    (rest,) = rows(spec, "sources", anchor_source="5 others", candidate_source="5 others")
    assert rest["push_share"] == pytest.approx(25 / 400)
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["rect"]  # no room for words
    alike = charts.source_chart(harm(["a"], ["x\x07", "x\x08"]), theme=Theme.LIGHT)
    assert {cell["anchor_source"] for cell in alike["datasets"]["sources"]} == {"x\ufffd", "x\ufffd (2)"}


def test_the_figure_in_a_cell_can_be_read_on_its_colour():
    for theme in Theme:
        spec = charts.source_chart(detailed_report().harm, theme=theme, width=760)
        grounds = [item for item in marks(spec, "rect") if isinstance(item["fill"], str)]
        words = [item for item in marks(spec, "text") if item.get("text") in ("0.06", "0.02")]
        assert len(words) == 9
        for word in words:
            (ground,) = [
                item
                for item in grounds
                if 0 < word["x"] - item["x"] < item["width"] and 0 < word["y"] - item["y"] < item["height"]
            ]
            assert contrast(hexadecimal(word["fill"]), hexadecimal(ground["fill"])) >= 4.5


def test_a_running_job_draws_what_it_has():
    curve = full_report().curve
    for part in ([], curve[:1], curve[:2]):
        spec = charts.share_chart(part, budget=0.2, theme=Theme.DARK, width=600)
        assert [row["batch_size"] for row in rows(spec, "share", series="share")] == [
            point.batch_size for point in part
        ]
        assert charts.render_svg(spec).startswith("<svg")
        assert charts.render_svg(charts.similarity_chart(part, theme=Theme.DARK, width=600)).startswith(
            "<svg"
        )


def test_histogram_keeps_every_pair():
    report = full_report()
    spec = charts.histogram_chart(report.histogram, theme=Theme.LIGHT)
    bars = spec["datasets"]["histogram"]
    assert sum(bar["pairs"] for bar in bars if bar["kind"] == "all negative pairs") == sum(
        report.histogram.all_pairs
    )
    assert sum(bar["pairs"] for bar in bars if bar["kind"] == "known false negatives") == sum(
        report.histogram.known_false_negatives
    )
    starts = [bar["from"] for bar in bars if bar["kind"] == "all negative pairs"]
    assert len(starts) <= 100
    assert all(bar["to"] > bar["from"] for bar in bars)


# ------------------------------------------------------------------------------------------ positions


def test_the_limit_stands_at_its_batch_size():
    report = full_report()
    assert report.advice.n_max.value == 27
    spec = share(report, width=760)
    upright = [item for item in marks(spec, "rule") if item.get("y") == 0 and item.get("y2") == 320]
    # The axis runs from 2 to 1024 over 760 − 190 pixels: log2(27 / 2) of 9 octaves.
    assert [item["x"] for item in upright] == [pytest.approx(math.log2(27 / 2) / 9 * 570, abs=0.51)]
    (label,) = [item for item in marks(spec, "text") if str(item.get("text")).startswith("n_max")]
    assert label["text"] == "n_max = 27"


def test_the_budget_stands_at_its_share():
    level = [
        item for item in marks(share(full_report(budget=0.3), width=760), "rule") if item.get("x2") == 570
    ]
    heights = [item["y"] for item in level if item.get("strokeDash")]
    assert heights == [pytest.approx(0.7 * 320, abs=0.51)]


def test_the_share_axis_runs_from_zero_to_one():
    report = full_report()
    drawn = sorted((item["x"], item["y"]) for item in marks(share(report, width=760), "symbol"))
    assert len(drawn) == len(report.curve)
    for (x, y), point in zip(drawn, report.curve, strict=True):
        value = point.false_negative_softmax_share.value
        assert x == pytest.approx(math.log2(point.batch_size / 2) / 9 * 570, abs=0.01)
        assert y == pytest.approx((1 - value) * 320, abs=0.01)


def test_no_limit_where_even_two_is_too_many():
    spec = share(all_equal_report(), width=760)
    assert [item for item in marks(spec, "rule") if item.get("y") == 0 and item.get("y2") == 320] == []
    texts = [item.get("text") for item in marks(spec, "text")]
    assert "no batch size\nis shown to be safe" in texts


def test_a_limit_beyond_the_sizes_tested_is_not_drawn_as_a_line():
    report = full_report(budget=0.9)
    assert not report.advice.n_max.exceeded
    spec = share(report, width=760)
    assert [item for item in marks(spec, "rule") if item.get("y") == 0 and item.get("y2") == 320] == []
    assert "n_max ≥ 1024\n(largest tested)" in [item.get("text") for item in marks(spec, "text")]


def test_every_line_is_named_and_no_two_names_touch():
    for report in (full_report(), all_equal_report(), single_size_report(), full_report(top_k=12)):
        spec = similarity(report, width=760)
        named = {row["series"] for row in spec["datasets"]["similarity_names"]}
        assert named == {row["series"] for row in spec["datasets"]["similarity"]}
        names = {row["name"] for row in spec["datasets"]["similarity_names"]}
        heights = sorted(item["y"] for item in marks(spec, "text") if item.get("text") in names)
        assert len(heights) == len(named)
        assert all(lower - upper > 13.9 for upper, lower in pairwise(heights))
        assert heights[0] >= 0
        assert heights[-1] <= 320


def test_the_similarity_axis_reaches_below_zero_only_where_something_is():
    spec = similarity(full_report(sizes=(16, 64)), width=760)
    domains = [
        layer["encoding"]["y"]["scale"]["domain"]
        for layer in spec["layer"]
        if "scale" in layer["encoding"]["y"]
    ]
    assert {tuple(domain) for domain in domains} == {(-0.05, 1.0)}


# ------------------------------------------------------------------------------------------ looks and safety


def luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def hexadecimal(colour):
    """#rrggbb of that or of rgb(r, g, b)."""
    if colour.startswith("#"):
        return colour
    return "#" + "".join(f"{int(part):02x}" for part in colour[4:-1].split(","))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", Theme)
@pytest.mark.parametrize("name", ["full", "detailed"])
def test_series_and_words_stand_out_from_the_background(theme, name):
    for kind, spec in all_charts(REPORTS[name](), theme).items():
        if kind == "sources":
            continue  # the colour of no harm is meant to be faint
        background = spec["config"]["background"]
        found = set()
        for layer in spec["layer"]:
            found |= set(layer["encoding"].get("color", {}).get("scale", {}).get("range", ()))
            found |= {layer["mark"]["color"]} if "color" in layer["mark"] else set()
        axis = spec["config"]["axis"]
        assert found
        for colour in found:
            assert contrast(colour, background) >= 3, colour
        for words in (axis["labelColor"], axis["titleColor"]):
            assert contrast(words, background) >= 4.5


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_renders(name):
    svg = charts.render_svg(charts.figure(REPORTS[name](), theme=Theme.DARK))
    root = ET.fromstring(svg)  # well-formed
    assert root.tag == f"{SVG}svg"
    assert "undefined" not in svg
    assert "NaN" not in svg


def test_the_figure_has_both_charts_with_their_axes_named():
    svg = charts.render_svg(charts.figure(full_report(), theme=Theme.LIGHT))
    texts = ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SVG}text")]
    for expected in (
        "Up to 27 rows in a batch are safe on this corpus.",
        "cosine similarity",
        "batch size N (log scale)",
        "n_max = 27",
        "budget 0.20",
        "mean of the 4 largest",
        "share S(N)",
    ):
        assert any(expected in text for text in texts), expected


def test_colours_of_the_two_charts_do_not_mix():
    report = full_report()
    spec = charts.figure(report, theme=Theme.LIGHT)
    label = {str(item.get("text")): item.get("fill") for item in marks(spec, "text")}
    alone = {str(item.get("text")): item.get("fill") for item in marks(share(report, width=760), "text")}
    assert label["budget 0.20"] == alone["budget 0.20"] != label["share S(N)"]
    report = detailed_report()
    points = [item["fill"] for item in marks(charts.figure(report, theme=Theme.LIGHT), "symbol")]
    of_share = [item["fill"] for item in marks(share(report, width=760), "symbol")]
    assert len(set(of_share)) == 4
    assert points[-len(of_share) :] == of_share


def test_texts_of_the_corpus_stay_text_in_the_picture():
    svg = charts.render_svg(charts.figure(hostile_report(), theme=Theme.LIGHT))
    root = ET.fromstring(svg)
    assert {node.tag for node in root.iter()} <= {
        SVG + tag for tag in ("svg", "g", "path", "rect", "line", "text", "tspan")
    }
    texts = ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    assert any("<script>alert(1)</script>" in text for text in texts)
    assert not any(character in svg for character in "\u202e\x1b\x07\x00")


def test_png_is_scaled():
    spec = similarity(single_size_report(), width=600)
    small, large = charts.render_png(spec, scale=1), charts.render_png(spec, scale=2)
    assert small.startswith(b"\x89PNG")
    width = [int.from_bytes(png[16:20], "big") for png in (small, large)]
    assert width[1] == pytest.approx(2 * width[0], abs=1)


def test_no_specification_asks_for_anything_outside():
    for report in (full_report(), hostile_report()):
        for spec in (*all_charts(report).values(), charts.figure(report, theme=Theme.DARK)):
            text = json.dumps({key: value for key, value in spec.items() if key != "$schema"})
            assert '"url"' not in text
            assert '"href"' not in text


def test_the_renderer_loads_nothing_from_outside():
    spec = {"data": {"url": "http://127.0.0.1:9/rows.json"}, "mark": "point", "encoding": {}}
    with pytest.raises(ServiceError, match="not allowed") as refusal:
        charts.render_svg(spec)
    assert refusal.value.code == "chart_failed"


def test_specifications_are_the_same_each_time():
    assert json.dumps(all_charts(full_report())) == json.dumps(all_charts(full_report()))


def test_charts_built_in_several_threads_are_those_built_in_one():
    report = full_report()
    alone = all_charts(report)
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # an unlucky moment comes soon
    try:
        with ThreadPoolExecutor(max_workers=4) as pool:
            together = list(pool.map(lambda _: all_charts(report), range(12)))
    finally:
        sys.setswitchinterval(switch_seconds)
    assert all(each == alone for each in together)


def test_importing_charts_does_not_import_altair():
    code = "import sys, probe_service.charts; print({'altair', 'vl_convert', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
