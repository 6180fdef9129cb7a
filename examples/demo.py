"""Probe the example corpus as a user of the service would: over HTTP, with a real encoder and a durable job.

Starts ``probe serve`` on a free port of this machine with a home folder of its own, submits the corpus,
follows the job, prints curve and verdicts, writes ``report.html`` and stops the service, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx

from probe_client import ProbeClient, ProbeClientError
from probe_service.schemas import Job, ProbeReport
from probe_service.text_chart import text_chart

START_WITHIN_SECONDS = 120.0
STOP_WITHIN_SECONDS = 20.0


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running_service(home: Path) -> Iterator[str]:
    """Run API and worker until the block ends; yields the base URL once the service is ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log_path = home / "service.log"
    probe = Path(sys.executable).with_name("probe")
    command = [str(probe), "serve", "--port", str(port), "--home", str(home)]
    # The embedded encoder's weights are installed already: nothing may wait for a network.
    environment = os.environ | {"PROBE_ENCODER": "minilm", "HF_HUB_OFFLINE": "1"}
    with log_path.open("wb") as log:
        service = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)  # noqa: S603
    try:
        wait_until_ready(url, service, log_path)
        yield url
    finally:
        service.terminate()
        try:
            service.wait(STOP_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def wait_until_ready(url: str, service: subprocess.Popen[bytes], log_path: Path) -> None:
    """Return when ``/ready`` answers 200; exit with the service's log if it ends or takes too long."""
    deadline = time.monotonic() + START_WITHIN_SECONDS
    while service.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.2)
    tail = "\n".join(log_path.read_text("utf-8", errors="replace").splitlines()[-20:])
    sys.exit(f"The service did not become ready. The end of its log:\n{tail}")


class ProgressLine:
    """Progress of a job on stderr: one line that is rewritten on a terminal, one line a phase elsewhere."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._phase: str | None = None

    def show(self, job: Job) -> None:
        """Show how far the job is."""
        progress = job.progress
        if progress is None:
            return
        sizes = ""
        if progress.curve_rows is not None:
            sizes = f", a first curve from {progress.curve_rows} rows"
        elif progress.curve:
            sizes = f", sizes up to {progress.curve[-1].batch_size} measured"
        line = f"{progress.phase}: {progress.done} of {progress.total} {progress.unit}{sizes}"
        if self._rewrites:
            print(f"\r\033[K  {progress.fraction:4.0%}  {line}", end="", file=sys.stderr, flush=True)
        elif progress.phase != self._phase:
            print(f"  {line}", file=sys.stderr, flush=True)
        self._phase = progress.phase

    def close(self) -> None:
        """Leave the terminal on a line of its own."""
        if self._rewrites and self._phase is not None:
            print(file=sys.stderr)


def probe_over_http(corpus: Path, report_path: Path) -> ProbeReport:
    """Start the service, submit the corpus, follow the job, keep the report; the service is stopped again."""
    with tempfile.TemporaryDirectory(prefix="probe-demo-") as folder, running_service(Path(folder)) as url:
        print(f"The service runs at {url}. Submitting {corpus} …", flush=True)
        with ProbeClient(url) as client:
            job = client.submit(path=corpus, request={"encoder": "minilm"})
            progress = ProgressLine()
            try:
                client.wait(job.id, on_progress=progress.show)
            finally:
                progress.close()
            report_path.write_text(client.report_html(job.id), encoding="utf-8")
            return client.report(job.id)


def print_summary(report: ProbeReport) -> None:
    """The curve and the verdicts as text, and what they mean."""
    print(f"\n{text_chart(report).rstrip()}\n\n{report.advice.headline}")
    for sentence in report.advice.explanation:
        print(textwrap.fill(sentence, width=100, initial_indent="  - ", subsequent_indent="    "))


def end_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    """Leave through the ``finally`` blocks, so that the service is stopped."""
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the demo; exit 1 with the reason if the service refuses or fails, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(__file__).with_name("helpdesk.jsonl"))
    parser.add_argument("--report", type=Path, default=Path("report.html"), help="where to write the report")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end_on_sigterm)
    began = time.monotonic()
    try:
        report = probe_over_http(arguments.corpus, arguments.report)
    except ProbeClientError as error:
        sys.exit(f"The probe failed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print_summary(report)
    print(f"\nThe report with its charts: {arguments.report.resolve()} ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
