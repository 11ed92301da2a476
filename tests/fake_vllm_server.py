"""A vLLM server as far as TRL's client speaks to it, with faults on demand. Completions are random words."""

import json
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

EOS, FIRST_WORD, LAST_WORD = 1, 3, 31  # of `tiny.tiny_tokenizer`


class FakeVLLMServer:
    """
    Answers on a port of its own until stopped.

    `faults` maps a path to what goes wrong there: `"hang"`, a status such as `"500"`, `"garbage"` (no JSON),
    `"unknown"` (other JSON), `"few"` (a choice is missing); and once only, `"break"` (the connection ends without an
    answer) and `"restart"` (the same, and a new server is up at once).
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.requests: list[str] = []
        self.hanging = threading.Event()  # set to let hanging requests go
        self.instance_id = uuid.uuid4().hex[:5]
        self.updates = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._serve()

    def _serve(self) -> None:
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes the server down: connections are refused."""
        self.hanging.set()
        self._http.shutdown()
        self._http.server_close()

    def start_again(self) -> None:
        """A new server at the same address, without what the old one knew."""
        self.hanging = threading.Event()
        self.forget()
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._serve()

    def forget(self) -> None:
        """What a restart does to the state."""
        self.faults.clear()
        self.instance_id, self.updates = uuid.uuid4().hex[:5], 0

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON for a request."""
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/server_info":
            config = {
                "instance_id": self.instance_id,
                "weight_transfer_config": {"backend": "nccl"},
                "model_config": {"logprobs_mode": "processed_logprobs"},
            }
            return {"vllm_config": config}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/v1/completions":
            prompts = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
            return {"choices": [self._choice(prompt, body["max_tokens"]) for prompt in prompts]}
        if path == "/finish_weight_update":
            self.updates += 1
        return {"message": "done"}

    def _choice(self, prompt: list[int], limit: int) -> dict[str, Any]:
        length = random.randint(2, limit + 4)
        ids = [random.randint(FIRST_WORD, LAST_WORD) for _ in range(length - 1)]
        ids = [*ids, EOS] if length <= limit else ids[:limit]
        names = [f"token_id:{token}" for token in ids]
        values = [-3.4] * len(ids)
        top = [{name: value} for name, value in zip(names, values, strict=True)]
        logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._respond()

            def do_POST(self) -> None:
                self._respond()

            def _respond(self) -> None:
                path = urlsplit(self.path).path
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.requests.append(path)
                fault = server.faults.get(path)
                if fault == "hang":
                    server.hanging.wait()
                if fault in ("break", "restart"):
                    del server.faults[path]
                if fault == "restart":
                    server.forget()
                if fault in ("hang", "break", "restart"):
                    return
                status, content = 200, b""
                if fault is not None and fault.isdecimal():
                    status, content = int(fault), b"EngineDeadError: out of memory"
                elif fault == "garbage":
                    content = b"<html>proxy</html>"
                elif fault == "unknown":
                    content = b'{"choices": [{"text": "hello"}]}'
                else:
                    answer = server.answer(path, json.loads(text or b"{}"))
                    if fault == "few":
                        answer["choices"].pop()
                    content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


@contextmanager
def fake_vllm_server() -> Iterator[FakeVLLMServer]:
    """A server that is stopped at the end."""
    server = FakeVLLMServer()
    try:
        yield server
    finally:
        server.stop()
