"""Reward functions and services: numbers come through, and every way to fail is said, with the source and a prompt."""

import http.server
import json
import threading

import pytest

from stages import rewards
from stages.errors import UserError

TEXTS = [{"prompt": f"p{i}", "response": "a" * i, "reference": None} for i in range(130)]
FUNCTIONS = """
def length(prompts, responses, references):
    print("said by the function")
    return [len(r) for r in responses]

def zero(prompts, responses, references):
    return [0.0] * len(prompts)

def short(prompts, responses, references):
    return [1.0]

def nan(prompts, responses, references):
    return [float("nan")] * len(prompts)

def text(prompts, responses, references):
    return ["good"] * len(prompts)

def missing(prompts, responses, references):
    return [None] * len(prompts)

def broken(prompts, responses, references):
    raise KeyError("no such prompt")
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    return tmp_path


def test_a_function_scores_responses_and_may_print(root):
    assert rewards.ask("my.py:length", TEXTS, root=root) == [float(i) for i in range(130)]


def test_zero_is_a_score(root):
    assert rewards.ask("my.py:zero", TEXTS, root=root) == [0.0] * 130


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("my.py:short", "1 scores for 130 responses"),
        ("my.py:nan", "nan for the response to 'p0'"),
        ("my.py:text", "'good' for the response to 'p0'"),
        ("my.py:missing", "None for the response"),
        ("my.py:broken", "no such prompt"),
        ("my.py:nowhere", "no function 'nowhere' in my.py; it has broken, length"),
        ("other.py:length", "no file 'other.py'"),
    ],
)
def test_a_failing_function_is_one_line_that_names_it(root, source, said):
    with pytest.raises(UserError) as caught:
        rewards.ask(source, TEXTS, root=root)
    assert said in str(caught.value) and source in str(caught.value) and "\n" not in str(caught.value)


def test_a_function_that_was_edited_meanwhile_is_refused(root):
    with pytest.raises(UserError, match="changed while the workflow ran"):
        rewards.ask("my.py:length", TEXTS, root=root, pin="0")


@pytest.fixture
def service(monkeypatch):
    """A service whose answers the test sets: a list of (status, body), the last one repeated."""
    monkeypatch.setattr(rewards.time, "sleep", lambda seconds: None)
    answers: list = []
    asked: list = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
            answer = answer(body) if callable(answer) else answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score", answers, asked
    server.shutdown()
    server.server_close()


def lengths(body):
    return {"rewards": [len(r) for r in body["responses"]]}


def test_a_service_is_asked_in_batches(root, service):
    url, answers, asked = service
    answers.append((200, lengths))
    assert rewards.ask(url, TEXTS, root=root) == [float(i) for i in range(130)]
    assert [len(a["prompts"]) for a in asked] == [64, 64, 2]


def test_a_service_that_fails_for_a_while_is_asked_again(root, service):
    url, answers, _ = service
    answers += [(503, {}), (500, {}), (200, lengths)]
    said = []
    assert len(rewards.ask(url, TEXTS[:3], root=root, progress=said.append)) == 3
    assert len(said) == 2 and "503" in said[0]


@pytest.mark.parametrize(
    ("answer", "said", "times"),
    [
        ((503, {}), "503", 4),
        ((404, {}), "404", 1),
        ((200, {"rewards": [1.0]}), "1 scores for 3 responses", 1),
        ((200, {"rewards": [1.0, None, 2.0]}), "None for the response to 'p1'", 1),
        ((200, {"scores": [1.0, 1.0, 1.0]}), "NoneType for 3 responses", 1),
    ],
)
def test_a_service_that_fails_for_good_is_named_after_limited_tries(root, service, answer, said, times):
    url, answers, asked = service
    answers.append(answer)
    with pytest.raises(UserError) as caught:
        rewards.ask(url, TEXTS[:3], root=root)
    assert said in str(caught.value) and url in str(caught.value) and "'p" in str(caught.value)
    assert len(asked) == times


def test_a_secret_is_put_in_for_the_request_and_shown_nowhere(root, service):
    url, answers, asked = service
    answers.append((404, {}))
    with pytest.raises(UserError) as caught:
        rewards.ask(url + "?key=${MY_KEY}", TEXTS[:1], root=root, secrets={"MY_KEY": "hush"})
    assert "${MY_KEY}" in str(caught.value) and "hush" not in str(caught.value) and len(asked) == 1
    with pytest.raises(UserError, match="variable MY_KEY is not set"):
        rewards.ask(url + "?key=${MY_KEY}", TEXTS[:1], root=root, secrets={})


def test_a_service_that_nobody_runs_is_named(root, monkeypatch):
    monkeypatch.setattr(rewards.time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/.*refused"):
        rewards.ask("http://127.0.0.1:9/", TEXTS[:1], root=root)
