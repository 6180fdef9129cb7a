"""The page driven as a person would: dropped file, job, growing curve, report."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.integration.service_process import ServiceProcess, texts_file

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\">",
    "<script>document.title='hacked'</script>",
    "\"><svg onload=document.title='hacked'>",
    "{{7*7}} ${7*7} javascript:document.title='hacked'",
    "\u202eright to left \x1b[31m",
)
HOSTILE_NAME = "<img src=x onerror=alert(1)>.jsonl"
REPORT_SECONDS = 240
JOB_ADDRESS = re.compile(r"/#/probes/[\w-]+$")


def grouped_rows(groups: int, rows_each: int) -> bytes:
    rows = [
        {
            "text": f"question {group} asked in way {way}",
            "group": f"g{group}",
            "source": ("faq", "mail")[way % 2],
        }
        for group in range(groups)
        for way in range(rows_each)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def drop(page: Any, *files: tuple[str, bytes]) -> None:
    """Drop files on the page, as the browser itself would hand them over."""
    page.goto("/")
    transfer = page.evaluate_handle(
        """files => {
            const transfer = new DataTransfer();
            for (const [name, codes] of files) transfer.items.add(new File([new Uint8Array(codes)], name));
            return transfer;
        }""",
        [[name, list(content)] for name, content in files],
    )
    page.dispatch_event("#drop-zone", "dragenter", {"dataTransfer": transfer})
    page.dispatch_event("#drop-zone", "drop", {"dataTransfer": transfer})


def option(page: Any, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    part = page.locator("details", has=field)
    if part.get_attribute("open") is None:
        part.locator("summary").click()
    field.fill(value)


def measure(page: Any) -> str:
    """Press the button and return the id of the job that the address then names."""
    page.get_by_role("button", name="Measure").click()
    page.wait_for_url(JOB_ADDRESS)
    return page.url.rpartition("/")[2]


def expect_report(page: Any) -> None:
    expect(page.locator("#verdict-title")).to_be_visible(timeout=REPORT_SECONDS * 1000)
    for chart in ("share", "similarity", "histogram"):
        expect(page.locator(f"[data-chart={chart}] svg")).to_be_visible()


def chart_texts(page: Any, name: str) -> list[str]:
    return page.locator(f"[data-chart={name}] svg text").all_text_contents()


@pytest.fixture(scope="module")
def finished(service: ServiceProcess) -> str:
    """The id of a job with a report, for tests that only look; its texts and its name mean harm."""
    rows = [{"text": text, "group": f"h{at}", "source": HOSTILE[0]} for at, text in enumerate(HOSTILE)]
    rows += [{"text": f"harmless {at}", "group": f"g{at // 2}", "source": HOSTILE[1]} for at in range(20)]
    content = "\n".join(json.dumps(row) for row in [*rows, *rows[: len(HOSTILE)]]).encode()
    columns = {"text": "text", "group": "group", "source": "source"}
    job_id = service.submit(HOSTILE_NAME, content, batch_sizes=[4, 8], corpus={"columns": columns})
    assert service.until_ended(job_id, within_seconds=REPORT_SECONDS)["state"] == "succeeded"
    return job_id


def look_at(page: Any, job_id: str) -> None:
    page.goto(f"/#/probes/{job_id}")
    expect_report(page)


# ------------------------------------------------------------------------------------------------ the main way


def test_a_dropped_file_grows_into_a_report(page, service):
    drop(page, ("helpdesk.jsonl", grouped_rows(groups=60, rows_each=3)))
    expect(page.locator("#chosen-name")).to_have_text("helpdesk.jsonl")
    assert page.locator("#columns option").evaluate_all("all => all.map(one => one.value)") == [
        "text",
        "group",
        "source",
    ]
    option(page, "Batch sizes", "4, 8, 16, 32, 64, 128")
    option(page, "Group column", "group")
    option(page, "Batches for each size, at least", "1000")
    page.evaluate(
        """() => {
            window.growth = [];
            new MutationObserver(() => {
                const state = document.getElementById("job-state").textContent;
                const sizes = document.querySelectorAll("#details table tbody tr").length;
                const bar = document.getElementById("job-bar").value;
                window.growth.push([state, sizes, bar]);
            }).observe(document.getElementById("job-view"), {childList: true, subtree: true, characterData: true});
        }"""
    )
    job_id = measure(page)
    expect(page.locator("#job-title")).to_have_text("helpdesk.jsonl")
    expect_report(page)

    growth = [(sizes, bar) for state, sizes, bar in page.evaluate("window.growth") if state == "running"]
    assert len({sizes for sizes, _ in growth}) >= 3, "the curve grew while the job ran"
    assert all(earlier <= later for (earlier, _), (later, _) in pairwise(growth))

    report = service.http.get(f"/v1/probes/{job_id}/report").json()
    assert page.locator("#verdict-title").text_content() == report["advice"]["headline"]
    n_max = report["advice"]["n_max"]["value"]
    assert page.locator("[data-n-max]").get_attribute("data-n-max") == (
        "none" if n_max is None else str(n_max)
    )
    assert page.locator(".verdicts .size").all_text_contents() == ["4", "8", "16", "32", "64", "128"]
    curve = page.get_by_role("region", name="Table of the curve").locator("tbody tr").all()
    for point, cells in zip(report["curve"], curve, strict=True):
        share = point["false_negative_softmax_share"]
        shown = cells.locator("td").nth(1).text_content()
        interval = f" ({share['low']:.3f}–{share['high']:.3f})" if share["low"] < share["high"] else ""
        assert shown == f"{share['value']:.3f}{interval}"
    assert any("budget" in text for text in chart_texts(page, "share"))
    for chart in ("share", "similarity"):
        page.wait_for_function(
            "name => [...document.querySelectorAll(`[data-chart=${name}] svg text`)].some(one => one.textContent === '128')",
            arg=chart,
        )
    assert (
        report["pair_search"]["description"] in page.locator(".card", has=page.locator(".pairs")).inner_text()
    )
    first_pair = page.locator(".pairs > li").first.text_content()
    assert report["pairs"][0]["text"] in first_pair
    assert report["pairs"][0]["other_text"] in first_pair
    expect_what_to_change(page, report)


def expect_what_to_change(page: Any, report: dict[str, Any]) -> None:
    """The blocks of a report whose S comes from all pairs, with the figures that it has."""
    remedies = page.get_by_role("region", name="Remedies").locator("tbody tr").all()
    assert len(remedies) >= 5
    for remedy, row in zip(report["advice"]["remedies"], remedies, strict=True):
        assert row.locator("th strong").text_content() == remedy["title"]
        after, limit = remedy["share_after"], remedy["n_max_after"]
        shown = row.locator("td").all_text_contents()
        if after is None:
            assert shown[2] == "not measured, or as it is"
        else:
            assert float(shown[2].split(" ")[0]) == pytest.approx(after["value"], abs=5e-4)
        assert (limit is None) == (shown[3] == "not measured")
        assert row.locator("pre").all_text_contents() == ([remedy["snippet"]] if remedy["snippet"] else [])
    harm = report["harm"]
    rows = (
        page.get_by_role("region", name="Rows that bring the harm", include_hidden=True)
        .locator("tbody tr")
        .all()
    )
    assert [row.locator("p").text_content() for row in rows] == [each["text"] for each in harm["rows"]]
    assert {cell["anchor_source"] for cell in harm["sources"]} == {"faq", "mail"}
    expect(page.locator("[data-chart=sources] svg")).to_be_visible()
    assert {"faq", "mail"} <= set(chart_texts(page, "sources"))
    expect(page.locator("[data-chart=temperature] svg")).to_be_visible()
    assert "T = 0.05 (this report)" in chart_texts(page, "temperature")
    trade = page.locator("section.card", has=page.get_by_role("heading", name="What a larger batch costs"))
    assert all(sentence in trade.text_content() for sentence in report["advice"]["trade_off"])


def test_pasted_lines_are_probed_and_repeats_are_named(page, service):
    page.goto("/")
    lines = [f"line {number}" for number in range(40)]
    lines[9] = "line 3"
    page.get_by_label("Paste lines").fill("\n".join(lines))
    expect(page.locator("#line-count")).to_have_text("40 texts")
    option(page, "Batch sizes", "2, 8")
    measure(page)
    expect_report(page)
    expect(page.locator(".rows")).to_have_text("10")
    expect(page.locator("#details")).to_contain_text("1 row repeats an earlier row")


def test_links_lead_to_the_same_report(page, service, finished):
    look_at(page, finished)
    links = page.locator(".links a").evaluate_all("all => all.map(one => one.pathname)")
    assert links == [
        f"/v1/probes/{finished}/{end}" for end in ("report.html", "report", "chart.svg", "chart.png")
    ]
    for link in links:
        assert service.http.get(link).status_code == 200


def test_reload_and_back_keep_the_job_and_the_list_names_it(page, finished):
    look_at(page, finished)
    headline = page.locator("#verdict-title").text_content()
    page.reload()
    expect(page.locator("#verdict-title")).to_have_text(headline)
    page.get_by_role("link", name="New probe").first.click()
    expect(page.locator("#home-title")).to_be_visible()
    expect(page.locator(".job-name").get_by_text(HOSTILE_NAME)).to_be_visible()
    page.go_back()
    expect(page.locator("#verdict-title")).to_have_text(headline)


def test_the_options_reach_the_service(page, service):
    drop(
        page, ("rows.csv", b"question,answer,topic\n" + b"".join(b"q%d,a%d,t\n" % (n, n) for n in range(40)))
    )
    for label, value in {
        "Batch sizes": "8 4",
        "Temperature": "0.1",
        "Budget": "0.3",
        "Text column": "question",
        "Positive column": "answer",
        "Source column": "topic",
        "Rows to encode, at most": "40",
        "Batches for each size, at least": "7",
        "Seed": "5",
        "List pairs from a similarity of": "0.85",
        "Devices": "2",
    }.items():
        option(page, label, value)
    page.get_by_label("Sampler", exact=True).select_option("no_duplicates")
    page.get_by_label("The loss gathers the rows of all devices").check()
    page.get_by_label("Encoder").select_option("minilm")
    page.get_by_label("Texts that differ only in case are equal").check()
    job_id = measure(page)
    request = service.job(job_id)["request"]
    assert {name: request[name] for name in ("encoder", "batch_sizes", "temperature", "budget", "seed")} == {
        "encoder": "minilm",
        "batch_sizes": [4, 8],
        "temperature": 0.1,
        "budget": 0.3,
        "seed": 5,
    }
    assert (request["num_repeats"], request["pairs_above"]) == (7, 0.85)
    assert (request["corpus"]["max_rows"], request["corpus"]["case_fold"]) == (40, True)
    sampler = request["sampler"]
    assert (sampler["kind"], sampler["world_size"], sampler["gather"]) == ("no_duplicates", 2, True)
    columns = request["corpus"]["columns"]
    assert (columns["anchor"], columns["positive"], columns["source"]) == ("question", "answer", "topic")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#job-state")).to_have_text("cancelled", timeout=REPORT_SECONDS * 1000)


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_bad_file_is_refused_at_once_with_code_and_row(page, watched):
    drop(page, ("broken.jsonl", b'{"text": "a"}\n{"text": \n{"text": "c"}\n'))
    page.get_by_role("button", name="Measure").click()
    problem = page.locator("#form-error")
    expect(problem).to_contain_text("corpus_bad_line")
    expect(problem).to_contain_text("First bad row: 2")
    watched.expect_refusal(422)
    expect(page.locator("#chosen-name")).to_have_text("broken.jsonl")


def test_a_fault_deep_in_a_file_ends_the_job_with_code_and_row(page):
    rows = [json.dumps({"text": f"row {number} " + "x" * 150}) for number in range(1, 1101)]
    rows[1000] = '{"text": "no end'
    drop(page, ("deep.jsonl", "\n".join(rows).encode()))
    measure(page)
    problem = page.locator("#job-error")
    expect(problem).to_contain_text("corpus_bad_line", timeout=60_000)
    expect(problem).to_contain_text("First bad row: 1001")
    expect(page.locator("#job-state")).to_have_text("failed")


def test_a_file_above_the_limit_is_refused(page, watched):
    drop(page, ("big.txt", b""))
    page.locator("#corpus-file").set_input_files(
        {"name": "big.txt", "mimeType": "text/plain", "buffer": b"0123456789 abcdef\n" * 200_000}
    )
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("#form-error")).to_contain_text("payload_too_large")
    watched.expect_refusal(413)


def test_fields_that_cannot_be_meant_are_refused_beside_the_field(page):
    drop(page, ("rows.txt", b"a\nb\nc\n"))
    for label, value, said in (
        ("Batch sizes", "16, 1", "1 will not do"),
        ("Temperature", "0", "above 0"),
        ("Budget", "2", "from 0 to 1"),
        ("Rows to encode, at most", "many", "many will not do"),
        ("Devices", "0", "at least 1"),
    ):
        option(page, label, value)
        page.get_by_role("button", name="Measure").click()
        expect(page.locator("#form-error")).to_contain_text(said)
        expect(page.get_by_label(label, exact=True)).to_be_focused()
        expect(page.get_by_label(label, exact=True)).to_have_attribute("aria-invalid", "true")
        page.get_by_label(label, exact=True).fill("")


def test_nothing_to_send_and_two_files_are_said(page):
    page.goto("/")
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("#form-error")).to_contain_text("Drop a file or paste some lines")
    drop(page, ("a.txt", b"a\n"), ("b.txt", b"b\n"))
    expect(page.locator("#form-error")).to_contain_text("2 files were dropped")
    expect(page.locator("#chosen-file")).to_be_hidden()


def test_a_job_that_is_not_there(page, watched):
    page.goto("/#/probes/00000000-0000-0000-0000-000000000000")
    expect(page.locator("#job-error")).to_contain_text("job_not_found")
    watched.expect_refusal(404)


def test_cancel_ends_the_job_and_delete_removes_it(page, service, watched):
    drop(page, ("slow.txt", texts_file(4000)))
    job_id = measure(page)
    expect(page.locator("#job-state")).to_have_text("running")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#job-state")).to_have_text("cancelled", timeout=20_000)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete this probe").click()
    expect(page.locator("#home-title")).to_be_visible()
    expect(page.locator(".jobs")).not_to_contain_text("slow.txt")
    assert service.http.get(f"/v1/probes/{job_id}").status_code == 404


# ------------------------------------------------------------------------------------------------ hostile corpora


def test_texts_that_mean_harm_are_shown_as_text(page, finished):
    look_at(page, finished)
    expect(page.locator("#job-title")).to_have_text(HOSTILE_NAME)
    shown = page.locator(".pairs").text_content()
    assert all(text in shown for text in HOSTILE[:-1]), "the repeated texts are the most similar pairs"
    assert "\ufffdright to left \ufffd[31m" in shown, "a character that steers the line is made visible"
    assert HOSTILE[0] in page.locator(".pair-side .hint").first.text_content(), "the source is shown as well"
    assert page.locator("main img, main script, .pairs svg").count() == 0
    assert "hacked" not in page.title()


# ------------------------------------------------------------------------------------------------ outages


def test_the_worker_is_killed_and_the_job_still_ends(page, service):
    drop(page, ("killed.txt", texts_file(600)))
    option(page, "Batch sizes", "4, 8")
    job_id = measure(page)
    service.until(job_id, lambda job: job["progress"] is not None and job["progress"]["phase"] == "encoding")
    service.kill_worker()
    expect(page.locator("#worker-notice")).to_contain_text("The worker was restarted", timeout=60_000)
    expect_report(page)
    assert service.job(job_id)["attempts"] == 2


def test_the_service_is_killed_and_the_page_comes_back_by_itself(chromium, page, service, watched):
    drop(page, ("away.txt", texts_file(600)))
    option(page, "Batch sizes", "4, 8")
    job_id = measure(page)
    service.until(job_id, lambda job: job["progress"] is not None)
    service.kill_api()
    notice = page.locator("#link-notice")
    expect(notice).to_contain_text("does not answer", timeout=30_000)
    service.start(wait_for="/health")
    expect(notice).to_be_hidden(timeout=30_000)
    expect_report(page)
    watched.expect_outage()


def test_a_missing_worker_is_said(chromium, tmp_path):
    lonely = ServiceProcess(tmp_path / "lonely", with_worker=False)
    try:
        lonely.start(wait_for="/health")
        job_id = lonely.submit("waits.txt", texts_file(20))
        context = chromium.new_context(base_url=f"http://127.0.0.1:{lonely.port}")
        page = context.new_page()
        page.goto(f"/#/probes/{job_id}")
        expect(page.locator("#job-state")).to_have_text("waiting")
        expect(page.locator("#worker-notice")).to_contain_text("No worker is alive")
        context.close()
    finally:
        lonely.stop()


# ------------------------------------------------------------------------------------------------ for everybody


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_window(page, width, finished):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("/")
    page.get_by_text("Options", exact=True).click()
    page.get_by_text("Advanced: how training draws batches").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    look_at(page, finished)
    page.get_by_text("What was read, and how").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_the_keyboard_reaches_the_button(page):
    page.goto("/")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, progress")]
            .filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim()
                || one.getAttribute("aria-labelledby")))
            .map(one => one.outerHTML)"""
    )
    assert nameless == []
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        outline = page.evaluate(
            """() => {
                const one = document.activeElement.id === "corpus-file"
                    ? document.getElementById("drop-zone") : document.activeElement;
                return getComputedStyle(one).outlineStyle;
            }"""
        )
        assert outline != "none", f"{reached[-1]} shows no focus"
        if reached[-1] == "measure":
            break
    assert reached.index("corpus-file") < reached.index("pasted-lines") < reached.index("batch-sizes")
    assert reached[-1] == "measure"


def test_charts_follow_light_and_dark(page, finished):
    def ink() -> str:
        return page.locator("[data-chart=share] svg text").first.get_attribute("fill")

    page.emulate_media(color_scheme="light")
    look_at(page, finished)
    light = ink()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "light => document.querySelector('[data-chart=share] svg text').getAttribute('fill') !== light",
        arg=light,
    )
    assert ink() != light


def test_a_key_is_asked_for_and_kept_for_the_tab(chromium, tmp_path):
    locked = ServiceProcess(tmp_path / "locked", with_worker=False, api_keys='["s3cret"]')
    watched = Watched()
    try:
        locked.start(wait_for="/health")
        context = chromium.new_context(base_url=f"http://127.0.0.1:{locked.port}")
        page = context.new_page()
        page.on("pageerror", lambda error: watched.page_errors.append(str(error)))
        page.goto("/")
        page.get_by_label("API key").fill("s3cret")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#home-title")).to_be_visible()
        expect(page.locator("#recent-empty")).to_be_visible()
        page.reload()
        expect(page.locator("#recent-empty")).to_contain_text("None yet")
        context.close()
        assert watched == Watched()
    finally:
        locked.stop()


# ------------------------------------------------------------------------------------------------ the audit


def until_stored(service: ServiceProcess, job_id: str, number: int, word: str) -> None:
    """Wait until the service has this answer to the question of this number."""
    deadline = time.monotonic() + 20
    found = None
    while found != word:
        assert time.monotonic() < deadline, (number, word, found)
        query = {"offset": number - 1, "limit": 1}
        page = service.http.get(f"/v1/probes/{job_id}/audit/pairs", params=query).json()
        found = page["questions"][0]["answer"]


def folded(text: str) -> str:
    """A text without case and end, by which hidden duplicates differ from what they repeat."""
    return text.rstrip(" .!?").lower()


def test_pairs_are_labelled_by_key_and_the_labels_become_a_result(page, service, watched):
    rows = [
        {"question": f"{HOSTILE[0]} how to {at}?", "answer": f"do {at} like this {HOSTILE[1]}"}
        for at in range(40)
    ]
    content = "\n".join(json.dumps(row) for row in rows).encode()
    job_id = service.submit("faq.jsonl", content, batch_sizes=[8], num_repeats=2)
    assert service.until_ended(job_id, within_seconds=REPORT_SECONDS)["state"] == "succeeded"
    path = f"/v1/probes/{job_id}/audit"

    page.goto(f"/#/probes/{job_id}")
    page.get_by_role("link", name="Audit with labels").click()
    page.get_by_label("100 labels").check()
    watched.expect_refusal(404)  # there was no audit yet
    page.get_by_role("button", name="Draw pairs").click()
    place = page.locator("#question-place")
    expect(place).to_contain_text("Question 1 of")
    first = service.http.get(f"{path}/pairs", params={"limit": 1}).json()["questions"][0]
    sides = [page.locator(".side p").nth(at).text_content() for at in range(3)]
    assert sides == [first["anchor"], first["positive"], first["candidate"]]
    assert page.locator(".texts img, .texts script").count() == 0
    assert "hacked" not in page.title()

    for number, (key, word) in enumerate((("y", "yes"), ("n", "no"), ("u", "unsure")), start=1):
        page.keyboard.press(key)
        expect(place).to_contain_text(f"Question {number + 1} of")
        until_stored(service, job_id, number, word)
    page.keyboard.press("b")
    expect(place).to_contain_text("Question 3 of")
    expect(page.get_by_role("button", name="Unsure")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="No n").click()
    expect(place).to_contain_text("Question 4 of")
    until_stored(service, job_id, 3, "no")

    page.reload()
    expect(place).to_contain_text("Question 4 of")
    page.keyboard.press("ArrowLeft")
    expect(place).to_contain_text("Question 3 of")
    page.keyboard.press("n")
    expect(place).to_contain_text("Question 4 of")

    questions = service.http.get(f"{path}/pairs", params={"offset": 4, "limit": 200}).json()["questions"]
    answers = [
        {"id": each["id"], "answer": "yes" if folded(each["candidate"]) == folded(each["positive"]) else "no"}
        for each in questions
    ]
    assert service.http.post(f"{path}/labels", json=answers).json()["open"] == 1
    page.reload()
    expect(place).to_contain_text("Question 4 of")
    page.keyboard.press("n")
    expect(page.locator("#audit-answer")).to_be_visible()
    expect(page.locator("[data-chart=audit] svg")).to_be_visible()
    report = service.http.get(f"{path}/report").json()
    labels = report["labels"]
    expect(page.locator(".facts")).to_contain_text(
        f"{labels['yes']} yes, {labels['no']} no, {labels['unsure']} unsure"
    )
    (share,) = report["shares"]
    shown = page.locator("#audit-body tbody td").nth(1)
    expect(shown).to_have_text(
        re.compile(rf"^{share['estimate']['value']:.3f} \(.+–{share['estimate']['high']:.3f}\)$")
    )
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete this audit").click()
    expect(page.get_by_role("button", name="Draw pairs")).to_be_visible()
    watched.expect_refusal(404)
