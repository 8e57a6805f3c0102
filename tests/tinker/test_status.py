"""The page and the status of a service: each tenant sees its own."""

import httpx
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tests.tinker.test_tenants import model_of  # noqa: E402


def page(served, key=""):
    return httpx.get(served.url, auth=("any", key) if key else None)


def test_the_page_shows_each_tenant_its_own(shared):
    models = {key: model_of(shared, key, rank=2)[0] for key in ("tml-ada", "tml-bob")}
    shown = {key: page(shared, key).text for key in (*models, "tml-ops")}
    for key, text in shown.items():
        assert [model in text for model in models.values()] == [key != "tml-bob", key != "tml-ada"], key
    refused = page(shared)
    assert refused.status_code == page(shared, "tml-wrong").status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    answer = page(shared, "tml-bob")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "ada" not in answer.text
    assert "<script>" not in answer.text
    for asset in ("page.css", "vendor/htmx-4.0.1.min.js"):
        assert f"/static/{asset}" in answer.text
        assert httpx.get(f"{shared.url}/static/{asset}").status_code == 200
    assert httpx.get(f"{shared.url}/static/../pages.py").status_code == 404


def test_without_keys_only_names_of_this_machine_are_answered(served):
    assert httpx.get(served.url).status_code == 200
    for path in ("/", "/api/v1/status"):
        answer = httpx.get(served.url + path, headers={"host": "elsewhere.example"})
        assert answer.status_code == 421
        assert "Host" in answer.json()["detail"]
