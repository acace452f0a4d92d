"""The part of the Hugging Face Hub's API that huggingface_hub calls for a data set repository, on loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


class Hub:
    """What the server has.

    files: of its only repository. objects: uploaded through LFS. seen: method and path of each request. commit: hash of
    the files.
    """

    def __init__(self):
        self.repository, self.files, self.objects, self.seen, self.commit = None, {}, {}, [], "0" * 40


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _begin(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.path_only = unquote(urlsplit(self.path).path)
        self.hub.seen.append(f"{self.command} {self.path_only}")
        self.base = f"http://{self.headers['Host']}"

    def _authorised(self):
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
        return False

    def do_POST(self):
        self._begin()
        hub, path = self.hub, self.path_only
        if not self._authorised():
            return
        if path == "/api/repos/create":
            wanted = json.loads(self.body)
            assert wanted["type"] == "dataset"
            hub.repository = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            hub.private = wanted.get("visibility") == "private"
            self._answer(200, {"url": f"{self.base}/datasets/{hub.repository}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif re.fullmatch(rf"/api/datasets/{hub.repository}/preupload/main", path):
            files = json.loads(self.body)["files"]
            large = (".arrow", ".safetensors")
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(large) else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            self._answer(200, {"files": modes})
        elif path == f"/datasets/{hub.repository}.git/info/lfs/objects/batch":
            objects = json.loads(self.body)["objects"]
            actions = [
                {**o, "actions": {"upload": {"href": f"{self.base}/lfs/{o['oid']}", "header": {}}}} for o in objects
            ]
            self._answer(200, {"transfer": "basic", "objects": actions})
        elif path == f"/api/datasets/{hub.repository}/commit/main":
            self._commit()
        else:
            self._answer(404, {"error": f"not served: POST {path}"})

    def _commit(self):
        for line in self.body.splitlines():
            record = json.loads(line)
            value = record["value"]
            if record["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif record["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.commit = hashlib.sha1(repr(sorted(self.hub.files)).encode()).hexdigest()
        url = f"{self.base}/datasets/{self.hub.repository}/commit/{self.hub.commit}"
        self._answer(200, {"commitUrl": url, "commitOid": self.hub.commit, "success": True})

    def do_PUT(self):
        self._begin()
        oid = self.path_only.removeprefix("/lfs/")
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.objects[oid] = self.body
        self._answer(200)

    def do_HEAD(self):
        self._get()

    def do_GET(self):
        self._get()

    def _get(self):
        self._begin()
        hub, path = self.hub, self.path_only
        info = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/[^/]+)?", path)
        tree = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+/?", path)
        file = re.fullmatch(rf"/datasets/{hub.repository}/resolve/[^/]+/(.+)", path)
        if (info or tree) and (info or tree)[1] != hub.repository:
            missing = {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}
            self._answer(404, {"error": "Repository not found"}, **missing)
        elif info:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
            self._answer(200, {"id": hub.repository, "sha": hub.commit, "siblings": siblings, "tags": []})
        elif tree:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self._answer(200, entries)
        elif file and file[1] in hub.files:
            data = hub.files[file[1]]
            tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": hub.commit}
            self._answer(200, data, **tag)
        else:
            missing = {"X_Error_Code": "EntryNotFound", "X_Error_Message": "Entry not found"}
            self._answer(404, {"error": "Entry not found"}, **missing)


@contextlib.contextmanager
def serve():
    """(the hub, its address) while the context is open."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
