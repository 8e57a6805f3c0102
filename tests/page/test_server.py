"""The server: access, the files and pages it serves, and foreign text that stays text."""

import asyncio
import hashlib
import html
import json
import math
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from urllib.parse import quote, urlencode

import psutil
import pytest

from tests.page.folders import add_step, append, make_run, sample, write_samples
from verl.page.pages import segment

pytest.importorskip("starlette", reason="the extra `page` is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")

import httpx

from tests.page import hostile_urls
from tests.slow import slow
from verl.page import notes
from verl.page.pages import Site
from verl.page.reader import RunReader
from verl.page.server import make_app

TOKEN = "a-token-for-tests"
HOSTILE = "<script>alert(1)</script>\u202eevil\u0000</pre>\"'&\ud800" + "x" * 100


@pytest.fixture
def run_folder(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def site(run_folder, tmp_path):
    site = Site([run_folder], cache=tmp_path)
    site.views["run"].index.update()
    yield site
    site.close()


@pytest.fixture
def get(site):
    """`get(path)` is the response to a request of the user's."""
    app = make_app(site, TOKEN, "127.0.0.1", 8000)

    def get(path, *, method="GET", host="127.0.0.1:8000", cookies=True, headers=None, form=None):
        async def ask():
            jar = {"verl_page_8000": TOKEN} if cookies else {}
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://page", cookies=jar, verify=False
            ) as client:
                return await client.request(method, path, headers={"Host": host, **(headers or {})}, data=form)

        return asyncio.run(ask())

    return get


PAGES = ("/", "/run/run", "/run/run/metrics", "/run/run/config", "/run/run/log", "/run/run/samples", "/run/run/train/1",
         "/run/run/train/1/u/0", "/run/run/train/1/s/0", "/charts/run", "/metrics", "/compare")  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_served_with_a_strict_policy(get, path):
    answer = get(path)
    assert answer.status_code == 200, answer.text[:500]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"\sstyle=|\son[a-z]+=|<script>|https?://(?!www\.w3\.org)", answer.text)


def test_odd_urls_and_sizes(tmp_path):
    outcomes = Counter(hostile_urls.cases(random.Random(0), 150, tmp_path))
    assert {"200", "404", "accepted"} <= {what for _, what in outcomes}, outcomes


class TestGate:
    def test_a_request_needs_the_token(self, get):
        assert get("/run/run", cookies=False).status_code == 403
        assert get("/static/page.css", cookies=False).status_code == 403
        assert get("/run/run?token=wrong", cookies=False).status_code == 403
        answer = get(f"/run/run?token={TOKEN}&sort=mean", cookies=False)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/run/run?sort=mean"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert get("/metrics", cookies=False, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "127.0.0.1.evil.example", ""])
    def test_another_name_is_refused(self, get, host):
        """A page elsewhere could let its own name point to this machine."""
        assert get("/", host=host).status_code == 421

    @pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000"])
    def test_names_of_this_machine_are_let_in(self, get, host):
        assert get("/", host=host).status_code == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    def test_nothing_can_be_written(self, get, method):
        assert get("/run/run", method=method).status_code == 405

    def test_the_redirect_leads_nowhere_else(self, get):
        answer = get(f"/%2Fevil.example/?token={TOKEN}", cookies=False)
        assert answer.headers["location"] == "/evil.example/"


HOLDER = """
import sys, time
from pathlib import Path
from verl.tracking.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("holds", flush=True)
time.sleep(60)
"""


class TestForms:
    @pytest.fixture
    def post(self, get):
        """`post(action, fields)` sends a form of the page of the run, with what is hidden in it."""

        def post(action, fields, **more):
            hidden = dict(re.findall(r'type="hidden" name="(\w+)" value="(\w+)"', get("/run/run").text))
            return get(f"/run/run/{action}", method="POST", form={**hidden, **fields}, **more)

        return post

    def test_notes_are_saved_with_their_tags(self, post, get, run_folder):
        answer = post("notes", {"notes": "lr doubled #lr\r\n</textarea><b>\r\n"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/run/run")
        assert (run_folder / "notes.md").read_text() == "lr doubled #lr\n</textarea><b>\n"
        assert "</textarea><b>" not in get("/run/run").text
        assert '<span class="tag">lr</span>' in get("/").text

    def test_newer_notes_are_not_replaced(self, post, run_folder):
        digest = hashlib.sha256(b"").hexdigest()
        (run_folder / "notes.md").write_text("by an editor")
        answer = post("notes", {"notes": "by the page", "digest": digest})
        assert answer.status_code == 409
        assert "has changed since this page was opened" in answer.text
        assert (run_folder / "notes.md").read_text() == "by an editor"

    @pytest.mark.parametrize("content", [b"caf\xe9", "é".encode("utf-16"), b"n\0o\0", b"a" * 70_000], ids=len)
    def test_notes_that_the_page_cannot_read_stay(self, post, run_folder, content):
        (run_folder / "notes.md").write_bytes(content)
        assert "could not be replaced: " in post("notes", {"notes": "new"}).text
        assert (run_folder / "notes.md").read_bytes() == content

    @pytest.mark.parametrize(
        "text", ["👩\u200d🔬 \u200fשלום #lr", "line  \nof\u2028Markdown", "</textarea>&lt;", ""], ids=ascii
    )
    def test_saving_unchanged_notes_changes_nothing(self, post, get, run_folder, text):
        post("notes", {"notes": text})
        page = get("/run/run").text
        field = html.unescape(page.split('name="notes"')[1].split(">", 1)[1].split("</textarea>")[0])
        post("notes", {"notes": field})
        assert (run_folder / "notes.md").read_bytes() == (text and text + "\n").encode()

    def test_of_two_forms_at_once_one_is_saved(self, run_folder, around):
        """The second one looks at the notes while the first one replaces them."""
        run, threads, answers = RunReader(run_folder, "run"), [], []

        def slowly(write, path, text):
            if not threads:
                threads.append(threading.Thread(target=lambda: answers.append(run.notes.replace("second", digest))))
                threads[0].start()
                threads[0].join(0.2)
            write(path, text)

        around(notes, "write_atomically", slowly)
        digest = run.notes.digest
        assert run.notes.replace("first", digest) == ""
        threads[0].join()
        assert ["has changed" in answer for answer in answers] == [True]
        assert (run_folder / "notes.md").read_text() == "first\n"

    @pytest.mark.parametrize("size", [70_000, 300_000])
    def test_notes_that_are_too_long_are_not_saved(self, post, run_folder, size):
        assert "at most 64 KiB" in post("notes", {"notes": "a" * size}).text
        assert not (run_folder / "notes.md").exists()

    def test_notes_behind_a_link_are_not_written_there(self, post, run_folder, tmp_path):
        (tmp_path / "elsewhere").write_text("mine")
        (run_folder / "notes.md").symlink_to(tmp_path / "elsewhere")
        post("notes", {"notes": "new"})
        assert (tmp_path / "elsewhere").read_text() == "mine"

    @pytest.mark.parametrize("action", ["notes", "stop"])
    @pytest.mark.parametrize(
        ("fields", "more"), [({}, {"cookies": False}), ({"form": "0" * 64}, {}), ({"form": ""}, {})], ids=str
    )
    def test_another_site_can_send_nothing(self, post, run_folder, action, fields, more):
        assert post(action, {"notes": "new", **fields}, **more).status_code == 403
        assert not (run_folder / "notes.md").exists()

    def test_a_run_that_has_ended_is_not_stopped(self, post):
        assert "nothing was stopped" in post("stop", {}).text

    def test_a_process_that_does_not_hold_the_folder_is_not_stopped(self, post, run_folder):
        """The lock of a copied folder, or of a hostile one, may name any process."""
        with subprocess.Popen(["sleep", "60"]) as other:
            started = psutil.Process(other.pid).create_time()
            lock = {"pid": other.pid, "host": socket.gethostname(), "started": started}
            (run_folder / "run.lock").write_text(json.dumps(lock))
            assert "nothing was stopped" in post("stop", {}).text
            assert other.poll() is None
            other.kill()

    def test_the_process_that_holds_the_folder_gets_sigterm(self, post, run_folder):
        with subprocess.Popen([sys.executable, "-c", HOLDER, run_folder], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "holds\n"
            answer = post("stop", {})
            assert (answer.status_code, answer.headers["location"]) == (303, "/run/run")
            assert holder.wait(30) == -signal.SIGTERM

    def test_an_export_has_no_forms(self, run_folder, tmp_path):
        assert "<form" not in Site([run_folder], static=True, cache=tmp_path).page("/run/run").replace(
            '<form method="dialog">', ""
        )


@pytest.mark.parametrize(
    "path",
    ["/run/other", "/run/run/train/99", "/run/run/train/1/s/99", "/run/run/train/1/u/nobody", "/run/run/nothing",
     "/run/run/../../etc/passwd", "/static/../server.py", "/static/%2e%2e/server.py", "/run/run/%2e%2e/1",
     "/run/run/..%2f..%2fetc/1", "/run/run/train/1/s/" + "9" * 30],
)  # fmt: skip
def test_what_is_not_there_is_a_sentence(get, path):
    answer = get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "where", ["prompt", "response", "reward_error", "data_source", "uid", "ground_truth", "finish_reason"]
)
def test_hostile_text_stays_text(run_folder, site, get, where):
    rows = [{**sample(0, k), where: HOSTILE} for k in range(2)]
    rows = [{k: v for k, v in row.items() if k != "ordinal" or where != "uid"} for row in rows]
    write_samples(run_folder, "train", 1, rows)
    site.views["run"].index.update()
    unit = site.views["run"].index.rows("SELECT unit FROM samples JOIN files ON files.id = file WHERE step = 1")[0][
        "unit"
    ]
    for path in ("train/1", f"train/1/u/{segment(unit)}", "train/1/s/0", "samples", "samples?q=alert"):
        answer = get(f"/run/run/{path}")
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text
        assert "\u202e" not in answer.text, path
        assert answer.content.decode("utf-8")
    if where in ("prompt", "response"):
        assert "U+202E" in get(f"/run/run/train/1/u/{segment(unit)}").text


def test_a_query_with_marks_of_direction_shows_their_code_points(get):
    text = get("/run/run/samples?" + urlencode({"q": "a\u202eb"})).text
    assert "\u202e" not in text
    assert 'value="aU+202Eb"' in text


def test_a_source_with_marks_of_direction_can_be_chosen(run_folder, site, get):
    write_samples(run_folder, "train", 1, [{**sample(0, k), "data_source": HOSTILE} for k in range(2)])
    site.views["run"].index.update()
    text = get("/run/run/samples").text
    option = html.unescape(re.search(r'<option value="([^"]*evil[^"]*)"', text).group(1))
    assert "U+202E" in option
    chosen = get("/run/run/samples?" + urlencode({"tag": option})).text
    assert "none fits" not in chosen
    assert " selected" in chosen.partition(html.escape(option[:20]))[2][:200]


NUMBERS = ("9" * 15, "9" * 20, "9" * 5000, "-1", "²", "٣", "1e309", "nan", "inf", "1.5", "0x10", " 1", "")
QUERIES = {
    "/run/run/samples": ("page", "from", "to", "min", "max", "shorter", "longer", "gap", "sort", "split", "tag", "cut"),
    "/run/run/train/1": ("page", "sort", "only"),
    "/run/run/train/1/u/0": ("a", "b"),
    "/compare": ("a", "b", "step"),
    "/charts/run": ("all",),
}
NUMBERED = (
    "/run/run/train/{}",
    "/run/run/train/{}/u/0",
    "/run/run/train/1/u/{}",
    "/run/run/train/1/s/{}",
    "/charts/{}",
)


@pytest.mark.parametrize(
    ("number", "search"),
    [
        slow(number, search, when=place % 2 != bool(search))
        for place, number in enumerate(NUMBERS)
        for search in ({}, {"q": "a"})
    ],
    ids=lambda value: ascii(value[:6]) if isinstance(value, str) else "q" * len(value),
)
def test_no_number_of_an_address_breaks_a_page(get, number, search):
    addresses = [f"{path}?{urlencode({**search, name: number})}" for path, names in QUERIES.items() for name in names]
    addresses += [path.format(quote(number, safe="")) for path in NUMBERED if not search]
    for path in addresses:
        assert get(path).status_code in (200, 404), path


def test_hostile_names_of_metrics_stay_text(run_folder, site, get):
    append(run_folder / "metrics.jsonl", {"step": 4, "time": 1.0, "</script><script>alert(1)</script>": 1.0})
    site.views["run"].run.refresh(0)
    assert "<script>alert" not in get("/run/run/metrics").text


def test_a_sample_shows_reward_tokens_and_neighbours(get):
    text = get("/run/run/train/1/s/1").text
    data = json.loads(re.search(r'id="tokens-data">(.*?)</script>', text, re.DOTALL).group(1))
    assert data["texts"][:3] == ["The", " answer", " is"]
    columns = data["columns"]
    assert columns["log_ratio"] == pytest.approx([-0.01] * 6)
    differences = [math.exp(a) - math.exp(b) for a, b in zip(columns["trainer"], columns["log_prob"], strict=True)]
    assert columns["gap"] == pytest.approx(differences)
    assert data["columns"]["advantage"] == [0.5] * 6
    assert 'rel="prev" href="/run/run/train/1/s/0"' in text
    assert 'rel="next" href="/run/run/train/1/s/2"' in text
    assert "ground truth" in text


def test_tokens_that_do_not_train_are_folded(run_folder, site, get):
    row = sample(0, 0)
    row["response_mask"] = [True, True, False, False, True, True]
    row["messages"] = [
        {"role": "assistant", "content": "hi", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "9"},
    ]
    write_samples(run_folder, "train", 1, [row])
    text = get("/run/run/train/1/s/0").text
    assert text.count('<details class="turn env">') == 1
    assert "2 tokens" in text
    assert "Conversation" in text


def test_groups_are_sorted_by_spread(run_folder, site, get):
    scores = {0: [1, 1], 1: [1, 0], 2: [0, 0.5]}
    write_samples(
        run_folder,
        "train",
        1,
        [sample(o, k, score=float(s)) for o, values in scores.items() for k, s in enumerate(values)],
    )
    order = re.findall(r'class="item prompt" href="/run/run/train/1/u/(\d+)"', get("/run/run/train/1").text)
    assert order == ["1", "2", "0"]
    order = re.findall(r'class="item prompt" href="/run/run/train/1/u/(\d+)"', get("/run/run/train/1?only=signal").text)
    assert order == ["1", "2"]


def test_charts_follow_the_run(run_folder, get):
    before = get("/charts/run").json()["panels"][0]
    add_step(run_folder, 4, reward=0.875)
    time.sleep(0.25)  # the reader looks at most every 0.2 s
    after = get("/charts/run").json()["panels"][0]
    assert before["x"] == [1, 2, 3]
    assert after["x"] == [1, 2, 3, 4]
    assert after["series"][0]["values"][-1] == 0.875


def test_the_files_of_others_are_what_their_authors_published():
    """Each with its license; `sha256sum -c` in that folder checks them too."""
    from pathlib import Path

    import verl.page

    folder = Path(verl.page.__file__).parent / "static" / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in listed} == listed
    assert {path.name for path in folder.iterdir()} == {*listed, "SHA256SUMS"}
    assert {"htmx.LICENSE.txt", "uPlot.LICENSE.txt"} <= set(listed)
