"""A small Hugging Face hub on this computer: what datasets and huggingface_hub ask of dataset repositories, and faults.

    with FakeHub({"HuggingFaceFW/fineweb": {"README.md": b"...", "sample/10BT/000_00000.parquet": b"..."}}) as hub:
        subprocess.run([...], env=os.environ | hub.environment())     # a process that asks this hub and no other
        hub.fault("000_00000", status=503, times=2)                   # the next two requests of such a file fail
        assert any("sample/10BT" in request for request in hub.requests)

`README.md` gives the subsets, as on the hub: a YAML header with `configs:` (`readme()` writes one). Parquet, .bin and .gz
files are kept as the hub keeps large ones: with a sha256, and served through a redirect to another host (/cdn/...). A
repository may be changed while the hub runs (`hub.commit(repo, files)`): older commits stay, as on the hub.

For tests in this process there is `hub.use(monkeypatch)`: huggingface_hub reads HF_ENDPOINT when it is first imported.
"""

import hashlib
import json
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".parquet", ".bin", ".gz")
_PAGE = 1000  # entries of a folder in one answer
# Faults of the hub or of a proxy between, none of which is a status that says so.
WRONG_ANSWERS: tuple[dict[str, Any], ...] = (
    {"status": 200, "headers": {"Content-Type": "text/html"}, "body": b"<html>log in</html>"},
    {"status": 206},
    {"status": 206, "headers": {"Content-Range": "bytes 1-9/10"}},
    {"status": 206, "headers": {"Content-Range": "bytes 0-0/123456789"}},
    {"status": 206, "headers": {"Content-Encoding": "gzip"}, "body": b"not gzip"},
)


def readme(configs: dict[str, str | list[str]]) -> bytes:
    """A dataset card whose configurations have these patterns as their train files: {"sample-10BT": "sample/10BT/*"}."""
    entries = [
        {"config_name": name, "data_files": [{"split": "train", "path": pattern}]} for name, pattern in configs.items()
    ]
    return f"---\nconfigs: {json.dumps(entries)}\n---\n# A data set\n".encode()  # JSON is YAML


@dataclass
class Fault:
    """What happens to the next `times` requests whose path contains `match`; see FakeHub.fault."""

    match: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    drop_after: int | None = None
    short: int | None = None
    corrupt: int | None = None
    wait: float = 0.0


class FakeHub:
    """The hub as a context manager. repositories: {repository: {file: content}}. requests: "GET /path bytes=0-99" of each."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> file -> content
        self._heads: dict[str, str] = {}
        self._lock = threading.Lock()
        for repo, files in repositories.items():
            self.commit(repo, files)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self._home = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._home.cleanup()

    def environment(self) -> dict[str, str]:
        """Variables that send a process to this hub, with an empty cache of its own and no request to any other host."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": self._home.name,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets tells Amazon's S3 of each load_dataset
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def use(self, monkeypatch: Any) -> None:
        """Send this process to this hub: for what uses huggingface_hub alone (datasets keeps an address of its own)."""
        from huggingface_hub import constants

        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Make these files the repository's newest commit. Returns its name."""
        digest = hashlib.sha1(repr((repo, sorted((k, hashlib.sha1(v).digest()) for k, v in files.items()))).encode())
        self._commits.setdefault(repo, {})[digest.hexdigest()] = dict(files)
        self._heads[repo] = digest.hexdigest()
        return digest.hexdigest()

    def fault(
        self,
        match: str,
        *,
        times: int = 1,
        status: int | None = None,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        drop_after: int | None = None,
        short: int | None = None,
        corrupt: int | None = None,
        wait: float = 0.0,
    ) -> None:
        """What happens to the next `times` requests whose line ("GET /path", "HEAD /path") contains `match`.

        status: this HTTP status with `headers` and `body`. wait: seconds before the answer. Of a file's content:
        drop_after: the connection ends after so many bytes of the body; short: the body, with an honest length, has
        so many bytes fewer; corrupt: this byte of the body is flipped. match="GET /cdn/" are the contents of large files.
        """
        self._faults.append(Fault(match, times, status, headers or {}, body, drop_after, short, corrupt, wait))

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()

    def take_fault(self, line: str, has_body: bool) -> Fault | None:
        with self._lock:
            self.requests.append(line)
            for fault in self._faults:
                of_body = (fault.drop_after, fault.short, fault.corrupt) != (None, None, None)
                if fault.times and fault.match in line and (has_body or not of_body):
                    fault.times -= 1
                    return fault
        return None

    def find(self, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a branch or commit names, and its files."""
        commit = self._heads.get(repo) if revision in (None, "main") else revision
        files = self._commits.get(repo, {}).get(commit or "")
        return (commit, files) if commit and files is not None else None

    def knows(self, repo: str) -> bool:
        return repo in self._commits


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        path, query = unquote(address.path), parse_qs(address.query)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        cdn = re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        has_body = self.command == "GET" and bool(cdn or (file and not file[3].endswith(LARGE)))
        line = " ".join(filter(None, (self.command, path, self.headers.get("Range"))))
        self._fault = self.hub.take_fault(line, has_body)
        if self._fault:
            time.sleep(self._fault.wait)
            if self._fault.status:
                return self._send(self._fault.status, self._fault.body, self._fault.headers)
        if match := file or cdn:
            return self._send_file(*match.groups(), redirect=match is file)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._send_info(match[1], match[2], "blobs" in query)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._send_tree(match[1], match[2], match[3] or "", query)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            return self._send_paths(match[1], match[2], body)
        self._send(404, b"")

    def _send_info(self, repo: str, revision: str | None, blobs: bool) -> None:
        if not (found := self._find(repo, revision)):
            return
        commit, files = found
        siblings = [{"rfilename": name} | (_describe(content, name) if blobs else {}) for name, content in files.items()]
        self._send_json({"_id": "0", "id": repo, "sha": commit, "private": False, "gated": False, "disabled": False,
                         "downloads": 0, "likes": 0, "tags": [], "siblings": siblings})  # fmt: skip

    def _send_tree(self, repo: str, revision: str, folder: str, query: dict[str, list[str]]) -> None:
        if not (found := self._find(repo, revision)):
            return
        entries = _entries(found[1], folder, query.get("recursive", ["false"])[0].lower() == "true")
        if not entries:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + _PAGE < len(entries):
            others = "".join(f"&{key}={values[0]}" for key, values in query.items() if key != "cursor")
            headers["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?cursor={first + _PAGE}{others}>; rel="next"'
        self._send_json(entries[first : first + _PAGE], headers)

    def _send_paths(self, repo: str, revision: str, body: bytes) -> None:
        if not (found := self._find(repo, revision)):
            return
        is_json = "json" in (self.headers.get("Content-Type") or "")
        wanted = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        self._send_json([entry for entry in _entries(found[1], "", True) if entry["path"] in wanted])

    def _send_file(self, repo: str, revision: str, name: str, redirect: bool) -> None:
        if not (found := self._find(repo, revision)):
            return
        commit, files = found
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        about = _describe(files[name], name)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{about["oid"]}"', "Accept-Ranges": "bytes"}
        if redirect and "lfs" in about:
            sha256 = about["lfs"]["oid"]
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(about["size"])}
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{repo}/{commit}/{name}"
            return self._send(302, b"", headers)
        self._send_content(files[name], headers)

    def _send_content(self, content: bytes, headers: dict[str, str]) -> None:
        status, part = 200, content
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            if start >= len(content):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            status, part = 206, content[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        if self._fault and self._fault.short:
            part = part[: -self._fault.short]
        if self._fault and self._fault.corrupt is not None:
            at = self._fault.corrupt
            part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
        self._send(status, part, headers)

    def _find(self, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        found = self.hub.find(repo, revision)
        if not found:
            missing = "RevisionNotFound" if self.hub.knows(repo) else "RepoNotFound"
            self._send(404 if self.hub.knows(repo) else 401, b"", {"X-Error-Code": missing})
        return found

    def _send_json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if self._fault and self._fault.drop_after is not None:
                self.wfile.write(body[: self._fault.drop_after])
                self.wfile.flush()
                self.close_connection = True
            else:
                self.wfile.write(body)
        except ConnectionError:  # the reader has gone
            self.close_connection = True


def _describe(content: bytes, name: str) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    about: dict[str, Any] = {"size": len(content), "oid": blob, "blobId": blob}
    if name.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        about["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 134}
    return about


def _entries(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What is in a folder, in the form of the hub's tree."""
    prefix = folder + "/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name in sorted(name for name in files if name.startswith(prefix)):
        parts = name[len(prefix) :].split("/")
        for depth in range(1, len(parts)):
            path = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                oid = hashlib.sha1(path.encode()).hexdigest()
                entries.setdefault(path, {"type": "directory", "path": path, "oid": oid, "size": 0})
        if recursive or len(parts) == 1:
            entries[name] = {"type": "file", "path": name} | _describe(files[name], name)
    return list(entries.values())
