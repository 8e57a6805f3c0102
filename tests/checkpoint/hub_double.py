"""A Hub for tests: the HTTP interface of the Hugging Face Hub that an upload of a model uses."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_the_test"


class Hub:
    """`repositories` has the files of each commit by path; `fails` is a path's ending -> the status that it answers."""

    def __init__(self):
        self.repositories, self.private, self.large, self.fails, self.paths = {}, {}, {}, {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(*hub.post(self.path.partition("?")[0], body, self.headers.get("authorization")))

            def do_PUT(self):
                hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(200, {})

            def _answer(self, status, document):
                text = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def post(self, path, body, authorization):
        """(status, answer)."""
        self.paths.append(path)
        for ending, status in self.fails.items():
            if path.endswith(ending):
                return status, {"error": f"no {ending} today"}
        if path == "/api/validate-yaml":  # of the model card
            return 200, {"errors": [], "warnings": []}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            options = json.loads(body)
            name = f"{options['organization']}/{options['name']}" if options.get("organization") else options["name"]
            exists = name in self.repositories
            self.repositories.setdefault(name, {})
            self.private.setdefault(name, options.get("private", options.get("visibility") == "private"))
            return (409 if exists else 200), {"url": f"{self.url}/{name}"}
        if path.endswith("/preupload/main"):
            rows = [
                {"path": file["path"], "uploadMode": self._mode(file["path"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": rows}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/storage/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            return self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        return 404, {"error": f"no route {path}"}

    def _mode(self, path):
        return "lfs" if path.endswith(".safetensors") else "regular"

    def _commit(self, name, body):
        for line in body.decode().splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self.large[value["oid"]]
        return 200, {
            "success": True,
            "commitOid": "0" * 40,
            "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}",
            "hookOutput": "",
            "pullRequestUrl": None,
        }


@contextmanager
def serving(monkeypatch):
    """A Hub that huggingface_hub uses in this process, and a token for it."""
    from huggingface_hub import constants, hf_api

    hub = Hub()
    threading.Thread(target=hub.server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
