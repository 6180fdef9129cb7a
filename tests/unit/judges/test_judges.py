"""Judges answer what is open, keep each answer at once, and go on after a fault."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from probe_service.errors import RequestError, ServiceError
from probe_service.judges import Answer, LabelStore, Question, Sheet, answer_sheet, question_digest
from probe_service.judges.chat import ChatJudge
from probe_service.judges.cross_encoder import CrossEncoderJudge
from probe_service.judges.named import judge_by_name
from probe_service.judges.terminal import TerminalJudge


def questions(count):
    return [Question(f"q{n}", f"anchor {n}", None, f"candidate {n}") for n in range(count)]


@pytest.fixture
def sheet(tmp_path):
    made = Sheet(tmp_path / "pairs.jsonl", questions(6), {})
    made.write()
    return made


# ------------------------------------------------------------------------------------------------------------ terminal


def at_terminal(sheet, keys):
    """Label with these key presses; returns what was printed."""
    said, pressed = [], iter(keys)
    answer_sheet(sheet, TerminalJudge(lambda: next(pressed), said.append))
    return "\n".join(said)


def test_one_key_a_pair_and_quit(sheet):
    said = at_terminal(sheet, "ynxuq")
    assert Sheet.read(sheet.file).answers == {"q0": Answer.YES, "q1": Answer.NO, "q2": Answer.UNSURE}
    assert "Would you accept B as a positive for A?" in said
    assert "[1/6]" in said


def test_labelling_goes_on_where_it_was_left(sheet):
    at_terminal(sheet, "yq")
    said = at_terminal(Sheet.read(sheet.file), "nnnnn")
    assert "anchor 0" not in said
    assert Sheet.read(sheet.file).answers["q5"] is Answer.NO


def test_back_corrects_the_answer_before(sheet):
    at_terminal(sheet, "yybnq")
    assert Sheet.read(sheet.file).answers == {"q0": Answer.YES, "q1": Answer.NO}


def test_the_end_of_input_quits(sheet):
    def ended():
        raise EOFError

    answer_sheet(sheet, TerminalJudge(ended, lambda _line: None))
    assert sheet.answers == {}


def test_the_known_positive_is_shown_and_texts_cannot_steer_the_terminal(tmp_path):
    question = Question("q", "anchor\x1b[2J", "the positive", "candidate")
    said = at_terminal(Sheet(tmp_path / "p.jsonl", [question], {}), "y")
    assert "known positive of A: the positive" in said
    assert "\x1b" not in said


# ------------------------------------------------------------------------------------------------------- chat endpoint


class Endpoint:
    """A real HTTP server that answers as its script says, by anchor number; the last entry of a list repeats."""

    def __init__(self, script=None):
        self.script = script or {}
        self.asked = defaultdict(int)
        self.times = defaultdict(list)
        self.bodies, self.keys = [], []
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                shown = json.loads(body["messages"][1]["content"])
                number = int(shown["a"].split()[1])
                with endpoint.lock:
                    endpoint.running += 1
                    endpoint.most_running = max(endpoint.most_running, endpoint.running)
                    turn = endpoint.asked[number]
                    endpoint.asked[number] += 1
                    endpoint.times[number].append(time.monotonic())
                    endpoint.bodies.append(body)
                    endpoint.keys.append((self.path, self.headers.get("Authorization")))
                steps = endpoint.script.get(number, ["no"])
                step = steps[min(turn, len(steps) - 1)]
                try:
                    endpoint.answer(self, step)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client's time was up
                finally:
                    with endpoint.lock:
                        endpoint.running -= 1

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    @staticmethod
    def answer(handler, step):
        headers = {}
        if isinstance(step, str):
            status, body = 200, json.dumps({"choices": [{"message": {"content": step}}]})
        elif isinstance(step, float):
            time.sleep(step)
            status, body = 200, json.dumps({"choices": [{"message": {"content": "yes"}}]})
        elif isinstance(step, bytes):
            status, body = 200, step.decode()
        else:
            status, headers, *said = step
            body = said[0] if said else "refused"
        content = body.encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_arguments):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def chat(endpoint, **options):
    options = {"concurrency": 2, "timeout_seconds": 5.0, "first_wait_seconds": 0.01} | options
    return ChatJudge("judge-1", endpoint.url, "secret", **options)


def test_a_chat_model_answers_every_question_once(sheet):
    with Endpoint({0: ["Yes."], 1: ["**no**"], 2: ["unsure"], 3: ["<think>no, yes</think> yes"]}) as endpoint:
        answer_sheet(sheet, chat(endpoint))
    assert sheet.answers == {
        "q0": Answer.YES,
        "q1": Answer.NO,
        "q2": Answer.UNSURE,
        "q3": Answer.YES,
        "q4": Answer.NO,
        "q5": Answer.NO,
    }
    assert set(endpoint.asked.values()) == {1}
    assert set(endpoint.keys) == {("/v1/chat/completions", "Bearer secret")}
    assert "Would you accept B as a positive for A?" in endpoint.bodies[0]["messages"][0]["content"]
    assert set(sheet.judges.values()) == {f"chat:judge-1@{endpoint.url}"}


def test_429_500_timeouts_and_broken_answers_are_survived(sheet):
    script = {
        0: [(429, {}), "yes"],
        1: [(500, {}), (503, {}), "yes"],
        2: [0.6, "yes"],
        3: ["I cannot say that.", "yes"],
        4: ["maybe yes, maybe no", "still talking"],
        5: [b"{", b"[]"],
    }
    with Endpoint(script) as endpoint:
        answer_sheet(sheet, chat(endpoint, timeout_seconds=0.3))
    assert sheet.answers == {
        **{f"q{n}": Answer.YES for n in range(4)},
        "q4": Answer.UNSURE,
        "q5": Answer.UNSURE,
    }
    assert [endpoint.asked[n] for n in range(6)] == [2, 3, 2, 2, 2, 2]
    reminded = [body for body in endpoint.bodies if len(body["messages"]) == 4]
    assert reminded[0]["messages"][2]["role"] == "assistant"


def test_retry_after_is_honoured(sheet):
    with Endpoint({0: [(429, {"Retry-After": "1"}), "yes"]}) as endpoint:
        answer_sheet(sheet, chat(endpoint))
    first, second = endpoint.times[0]
    assert second - first >= 1.0


def test_an_endpoint_that_never_answers_loses_nothing_and_is_resumed(sheet):
    with Endpoint({3: [(503, {})]}) as endpoint:
        with pytest.raises(ServiceError) as caught:
            answer_sheet(sheet, chat(endpoint, concurrency=1))
        assert caught.value.code == "judge_unavailable"
        assert "6 attempts" in caught.value.message
        kept = Sheet.read(sheet.file)
        assert list(kept.answers) == ["q0", "q1", "q2"]
        assert endpoint.asked[4] == 0
        endpoint.script[3] = ["yes"]
        answer_sheet(kept, chat(endpoint))
        assert kept.answers["q3"] is Answer.YES
        assert not kept.open_questions
        assert [endpoint.asked[n] for n in (0, 1, 2, 4, 5)] == [1] * 5


def test_answers_in_flight_are_kept_when_another_question_fails(sheet):
    script = {0: [(401, {})], 1: [0.3]}
    with Endpoint(script) as endpoint, pytest.raises(ServiceError) as caught:
        answer_sheet(sheet, chat(endpoint, concurrency=2))
    assert caught.value.code == "judge_refused"
    assert "PROBE_JUDGE_API_KEY" in caught.value.message
    assert Sheet.read(sheet.file).answers["q1"] is Answer.YES


def test_a_crash_between_answers_loses_none(sheet):
    class Crash(Exception):
        pass

    def crash(done, _total):
        if done == 2:
            raise Crash

    with Endpoint() as endpoint, pytest.raises(Crash):
        answer_sheet(sheet, chat(endpoint, concurrency=1), on_answer=crash)
    assert len(Sheet.read(sheet.file).answers) == 2


def test_requests_run_at_the_stated_concurrency(sheet):
    with Endpoint({n: [0.1] for n in range(6)}) as endpoint:
        answer_sheet(sheet, chat(endpoint, concurrency=3))
    assert endpoint.most_running == 3


def test_a_model_that_chooses_its_own_temperature(sheet):
    with Endpoint({0: [(400, {}, "temperature must be 1"), "yes"]}) as endpoint:
        answer_sheet(sheet, chat(endpoint, concurrency=1))
    assert sheet.answers["q0"] is Answer.YES
    assert ["temperature" in body for body in endpoint.bodies] == [True] + [False] * 6


def test_nobody_at_the_address(sheet):
    with Endpoint() as endpoint:
        url = endpoint.url
    with pytest.raises(ServiceError) as caught:
        answer_sheet(sheet, ChatJudge("m", url, None, first_wait_seconds=0.001))
    assert caught.value.code == "judge_unavailable"


def test_the_cost_is_known_before_it_starts():
    judge = ChatJudge("m", "http://localhost:1/v1", None)
    one, two = judge.cost(questions(1)), judge.cost(questions(2))
    assert (one.calls, two.calls) == (1, 2)
    assert 100 < one.input_tokens < two.input_tokens <= 2 * one.input_tokens


# ----------------------------------------------------------------------------------------------------- labels used again


def test_labels_of_the_same_judge_are_used_again_but_not_for_checks(sheet, tmp_path):
    store = LabelStore(tmp_path / "labels.sqlite")
    with Endpoint() as endpoint:
        judge = chat(endpoint)
        known = {question_digest(q, str): (Answer.YES, judge.name) for q in sheet.questions[:4]}
        store.keep(known, "an earlier corpus")
        reused = answer_sheet(sheet, judge, store=store, fresh=frozenset({"q3"}))
    assert reused == 3
    assert [sheet.answers[f"q{n}"].value for n in range(6)] == ["yes"] * 3 + ["no"] * 3
    assert sorted(endpoint.asked) == [3, 4, 5]


# ------------------------------------------------------------------------------------------------------- cross-encoder


@pytest.fixture(scope="module")
def tiny_cross_encoder(tmp_path_factory):
    """A random BERT with one output, saved as a CrossEncoder finds it."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("cross-encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anchor", "candidate", *map(str, range(10))]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=1,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_cross_encoder_says_yes_from_its_threshold_on(sheet, tiny_cross_encoder):
    answer_sheet(sheet, CrossEncoderJudge(str(tiny_cross_encoder), threshold=-1e9, device="cpu"))
    assert set(sheet.answers.values()) == {Answer.YES}
    never = CrossEncoderJudge(str(tiny_cross_encoder), threshold=1e9, device="cpu")
    assert {judgement.answer for judgement in never.judge(questions(40))} == {Answer.NO}
    assert never.name == f"cross-encoder:{tiny_cross_encoder}≥1e+09"


def test_a_cross_encoder_that_is_not_there(sheet, tmp_path):
    with pytest.raises(ServiceError) as caught:
        answer_sheet(sheet, CrossEncoderJudge(str(tmp_path / "none"), device="cpu"))
    assert caught.value.code == "judge_unavailable"


# --------------------------------------------------------------------------------------------------------------- names


def test_judges_by_name(monkeypatch):
    monkeypatch.setenv("PROBE_JUDGE_API_KEY", "k")
    assert judge_by_name("chat:gpt-x@http://h/v1/").name == "chat:gpt-x@http://h/v1"
    assert judge_by_name("cross-encoder:org/name").name == "cross-encoder:org/name≥0.5"
    with pytest.raises(RequestError) as caught:
        judge_by_name("gpt-x")
    assert caught.value.code == "judge_unknown"
