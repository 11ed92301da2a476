"""Faults of a vLLM server: a bounded wait, one clear error, and no training on weights that a restart lost.

TRL's client waits for ever for a server that hangs, and asks again for a while when the server is gone. A server that
comes back within that while answers with the weights of its start, and training would go on with rollouts of another
policy. [`bounded_server`] makes the trainer that is built inside it use [`BoundedVLLMClient`], which differs in this:

1. Every request has a timeout, and one that ran into it is not sent again.
2. The server's `instance_id`, random at each start, is read when the weight group is made, and again after each
   generation and before each weight sync. If it is another, the new server has neither our weights nor our group.
3. Faults are raised as [`VLLMServerError`], which names the server and what to do.
4. When the server fails in the middle of a weight sync, the NCCL group is aborted, because the broadcast would wait
   for ever for workers that are gone. (Tested with a stand-in for NCCL only.)

A server that is down is asked again for about a minute, as TRL does; requests of a weight sync are sent once.

What is touched of TRL 1.16: the name `VLLMClient` in `trl.generation.vllm_generation` (exchanged while a trainer is
built), `VLLMClient.check_server` (replaced; TRL calls it before all other requests), `init_communicator`, `generate`,
`update_named_params`, `get_server_info`, `_get` and `_post` (overridden), `session`, `communicator` and `base_url`.
Of vLLM 0.32: `instance_id` in the answer of `/server_info`, and `PyNcclCommunicator.destroy`.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import requests
from requests.adapters import HTTPAdapter
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

# What a server answers to at once, if it is there at all.
CONNECT_SECONDS = 10.0
# Rendezvous and weights: sent again, they would wait for a broadcast that is over.
SENT_ONCE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


class VLLMServerError(RuntimeError):
    """
    The vLLM server cannot be relied on any more.

    Args:
        url (`str`):
            Address of the server.
        fault (`str`):
            What happened, as the end of "The vLLM server at ...".
    """

    def __init__(self, url: str, fault: str) -> None:
        super().__init__(
            f"The vLLM server at {url} {fault} Its own log tells why. Training cannot go on with it: start it again "
            "and resume from the last checkpoint (resume_from_checkpoint)."
        )


class PatientRetry(Retry):
    """Retries as TRL configures them, but not after a timeout: who waited that long should not wait again."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> "PatientRetry":
        """The retries that are left after this one."""
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, *args, **kwargs)


class BoundedSession(requests.Session):
    """
    A session whose requests end within a time and whose faults are [`VLLMServerError`]s.

    Args:
        url (`str`):
            Address of the server.
        timeout (`float`):
            Seconds that one request may take.
        retries ([`PatientRetry`]):
            When to send a request again.
    """

    def __init__(self, url: str, timeout: float, retries: PatientRetry) -> None:
        super().__init__()
        self.url, self.timeout = url, timeout
        self.mount(url, HTTPAdapter(max_retries=retries, pool_maxsize=64))  # TRL sends up to 64 requests at once
        for path in SENT_ONCE:
            self.mount(url + path, HTTPAdapter())

    def request(self, method: str, url: str, *args: Any, **kwargs: Any) -> requests.Response:  # type: ignore[override]
        """Sends a request."""
        path = url.removeprefix(self.url)
        kwargs.setdefault("timeout", (min(CONNECT_SECONDS, self.timeout), self.timeout))
        try:
            response = super().request(method, url, *args, **kwargs)
        except requests.exceptions.ReadTimeout as error:
            raise VLLMServerError(
                self.url, f"did not answer {path} within {self.timeout:g} s (vllm_request_timeout)."
            ) from error
        except requests.exceptions.RequestException as error:
            raise VLLMServerError(self.url, f"cannot be reached or broke off ({path}: {error}).") from error
        if response.status_code >= 400 and response.status_code != 404:  # what is missing at 404, TRL says itself
            raise VLLMServerError(self.url, f"answered {path} with {response.status_code}: {response.text[:500]}.")
        return response


class BoundedVLLMClient(VLLMClient):
    """
    TRL's client of a vLLM server with a bounded wait, which notices a server that was restarted.

    Args:
        *args, **kwargs:
            Passed on to `VLLMClient`.
        request_timeout (`float`):
            Seconds that one request may take.

    Raises:
        `VLLMServerError`: If the server fails; also by the methods.
    """

    # TRL's numbers, except that the last failed answer is returned instead of an exception without its text.
    retries: ClassVar = PatientRetry(
        total=5,
        connect=5,
        read=5,
        status=3,
        status_forcelist=[500, 502, 503],
        backoff_factor=2,
        allowed_methods=["POST", "GET"],
        raise_on_status=False,
    )

    def __init__(self, *args: Any, request_timeout: float, **kwargs: Any) -> None:
        self.request_timeout = request_timeout
        self.instance_id: str | None = None
        super().__init__(*args, **kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits for the server to be up, for at most `total_timeout` seconds."""
        self.session = BoundedSession(self.base_url, self.request_timeout, self.retries)
        end = time.monotonic() + total_timeout
        while True:
            try:
                # Not through the session, whose retries would take their own time.
                if requests.get(f"{self.base_url}/health", timeout=CONNECT_SECONDS).status_code == 200:
                    return
                fault = "is not healthy"
            except requests.exceptions.RequestException as error:
                fault = f"cannot be reached ({error})"
            if time.monotonic() >= end:
                raise VLLMServerError(self.base_url, f"{fault} after {total_timeout:g} s (vllm_server_timeout).")
            time.sleep(retry_interval)

    def init_communicator(self, *args: Any, **kwargs: Any) -> None:
        """Makes the weight update group, and remembers with which start of the server."""
        super().init_communicator(*args, **kwargs)
        self.instance_id = self._current_instance()

    def generate(self, prompts: list[Any], *args: Any, n: int = 1, **kwargs: Any) -> dict[str, list[Any]]:
        """Generates as `VLLMClient.generate` does, and checks that all is there and made with our weights."""
        try:
            output: dict[str, list[Any]] = super().generate(prompts, *args, n=n, **kwargs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise VLLMServerError(
                self.base_url, f"gave completions in an unknown form ({type(error).__name__}: {error})."
            ) from error
        count, wanted = len(output["completion_ids"]), len(prompts) * n
        if count != wanted:
            raise VLLMServerError(self.base_url, f"gave {count} completions instead of {wanted}.")
        self._check_same_instance()
        return output

    def update_named_params(self, *args: Any, **kwargs: Any) -> None:
        """Sends weights, after a look at whether the server still belongs to our group."""
        self._check_same_instance()
        super().update_named_params(*args, **kwargs)

    def get_server_info(self) -> dict[str, Any]:
        """Configuration of the server."""
        try:
            info: dict[str, Any] = super().get_server_info()
        except (KeyError, TypeError, ValueError) as error:
            raise VLLMServerError(
                self.base_url, f"answered /server_info in an unknown form ({type(error).__name__}: {error})."
            ) from error
        return info

    def _current_instance(self) -> str:
        instance_id = self.get_server_info().get("instance_id")
        if not instance_id:
            raise VLLMServerError(
                self.base_url, "tells no instance_id at /server_info, so a restart could not be noticed."
            )
        return str(instance_id)

    def _check_same_instance(self) -> None:
        current = self._current_instance()
        if current != self.instance_id:
            raise VLLMServerError(
                self.base_url,
                f"was restarted (its instance_id {self.instance_id} is now {current}): the trained weights are lost.",
            )

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._parsed(super()._get, url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> Any:
        try:
            return self._parsed(super()._post, url, **kwargs)
        except VLLMServerError:
            if url.endswith("/update_weights") and self.communicator is not None:
                self.communicator.destroy()  # ends the broadcast that another thread is in
            raise

    def _parsed(self, send: Any, url: str, **kwargs: Any) -> Any:
        try:
            return send(url, **kwargs)
        except json.JSONDecodeError as error:
            path = url.removeprefix(self.base_url)
            raise VLLMServerError(self.base_url, f"answered {path} with what is no JSON ({error}).") from error


@contextmanager
def bounded_server(request_timeout: float) -> Iterator[None]:
    """
    Makes a trainer that is built inside this context, with a vLLM server, use [`BoundedVLLMClient`].

    Without a server it changes nothing, so a trainer may use it always.

    Args:
        request_timeout (`float`):
            Seconds that one request may take: more than the longest generation or weight sync.
    """
    original = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = partial(BoundedVLLMClient, request_timeout=request_timeout)
    try:
        yield
    finally:
        vllm_generation.VLLMClient = original
