"""Odd URLs of every page, and odd values of times and sizes: a page, an error of verl, or a value in range."""

import asyncio
import datetime
import threading
import time
from urllib.parse import quote, urlencode

from tests.page.folders import make_run
from verl.config import PPO, PREFERENCE, SFT, load_config
from verl.config.roots.reward_model import RM
from verl.errors import VerlError
from verl.page.pages import Site
from verl.page.server import make_app

TOKEN, HOST = "a-token-for-tests", "127.0.0.1:8000"
NUMBERS = [
    "0", "1", "2", "-1", "00", "1.5", "1e9", "nan", "inf", "-0", "+1", "0x10", "9" * 15, "9" * 20, "9" * 400, "9" * 5000,
    str(2**31), str(2**63), str(-(2**63) - 1), "\u0661", "\u00b2", "1_0", " 1", "", "%00", "1;2", "..", "true", "'", "x" * 5000,
]  # fmt: skip
PATHS = [
    "/", "/run/run", "/run/run/metrics", "/run/run/config", "/run/run/log", "/run/run/samples", "/run/run/train/{}",
    "/run/run/{}/1", "/run/run/train/1/u/{}", "/run/run/train/1/s/{}", "/run/{}", "/charts/run", "/charts/{}", "/compare",
    "/metrics", "/static/{}", "/{}", "/run/run/train/{}/u/0", "/run/run/train/{}/s/{}",
]  # fmt: skip
PARAMETERS = [
    "q", "page", "min", "max", "from", "to", "step", "sort", "split", "longer", "shorter", "source", "cut", "failed",
    "conflict", "a", "b", "unit", "limit", "token", "by", "line",
]  # fmt: skip
UNITS = ("_s", "_mb", "_kb", "_gb", "timeout")
SIZES = ["0", "1", "-1", "1e12", "1e300", "1e18", str(2**31), str(2**63), str(10**18), str(10**30), "0.5", "nan", "inf"]


def url(rng):
    path = rng.choice(PATHS)
    path = path.format(*(quote(rng.choice(NUMBERS), safe="") for _ in range(path.count("{}"))))
    query = {rng.choice(PARAMETERS): rng.choice(NUMBERS) for _ in range(rng.randrange(4))}
    return path + (f"?{urlencode(query)}" if query else "")


def answer(app, path):
    """Status and text; an error of the page's code passes."""
    import httpx

    async def ask():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        cookies = {"verl_page_8000": TOKEN}
        async with httpx.AsyncClient(transport=transport, base_url="http://page", cookies=cookies) as client:
            return await client.get(path, headers={"Host": HOST})

    response = asyncio.run(ask())
    return response.status_code, response.text


def outcome_of_url(rng, app):
    path = url(rng)
    if len(path) > 60_000:
        return "url", "not asked"
    status, text = answer(app, path)
    assert status in (200, 303, 400, 403, 404, 414, 422), (path[:300], status)
    assert "Traceback" not in text, path[:300]
    return f"url {path.split('/')[1].partition('?')[0][:8]}", str(status)


def keys_with_units():
    """(program, key) of all read keys that are a time or a size by their name."""
    leaves = [(schema, leaf) for schema in (PPO, SFT, PREFERENCE, RM) for leaf in schema.leaves.values()]
    return [(schema, leaf.path) for schema, leaf in leaves if leaf.path.endswith(UNITS) and not leaf.inert]


def outcome_of_key(rng, keys):
    schema, key = rng.choice(keys)
    value = rng.choice(SIZES)
    files = {"ppo": "actor_rollout_ref.model.path=m"}.get(schema.name, "model.path=m")
    try:
        loaded = load_config([files, "data.train_files=x.jsonl", f"{key}={value}"], schema=schema)
    except VerlError as error:
        return "key", f"refused by {type(error).__name__}"
    section = loaded.config
    for name in key.split("."):
        section = getattr(section, name)
    if isinstance(section, int | float):
        assert section < 2**63, (key, value)
        if key.endswith(("_s", "timeout")):
            datetime.datetime.fromtimestamp(time.time() + section)
            assert section <= threading.TIMEOUT_MAX, (key, value)
    return "key", "accepted"


def cases(rng, count, folder):
    """(kind, outcome) of `count` URLs and values of keys."""
    site = Site([make_run(folder / "run")], cache=folder)
    site.views["run"].index.update()
    app, keys = make_app(site, TOKEN, "127.0.0.1", 8000), keys_with_units()
    try:
        for _ in range(count):
            yield outcome_of_url(rng, app) if rng.random() < 0.7 else outcome_of_key(rng, keys)
    finally:
        site.close()
