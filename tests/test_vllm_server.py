"""Faults of a vLLM server end in one clear error in bounded time, and never in training on lost weights."""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm_server import FakeVLLMServer, fake_vllm_server
from tiny import tiny_trainer
from transformers import TrainerCallback
from trl.generation import vllm_client, vllm_generation

from trainers import sagc_trainer, vllm_server
from trainers.vllm_server import BoundedVLLMClient, VLLMServerError, bounded_server

TIMEOUT = 1.0  # a sound answer takes milliseconds, also on a busy machine
COMPLETIONS = "/v1/completions"
WEIGHTS = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)}


class Communicator:
    """Stands in for NCCL's: a broadcast waits while `stuck`, until the communicator is destroyed."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.stuck = False
        self.destroyed = threading.Event()
        self.group = type("Group", (), {"store": None, "socket": None})()

    def destroy(self) -> None:
        self.destroyed.set()

    def broadcast(self, iterator: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        self.sent = [name for name, _ in iterator]
        if self.stuck:
            assert self.destroyed.wait(20), "nobody ended the broadcast"


@pytest.fixture(autouse=True)
def no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's client without NCCL and also without vLLM installed; retries without pauses."""

    def init_communicator(self: Any, device: Any = 0) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})
        self.communicator = Communicator()

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda **_: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", init_communicator)
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    monkeypatch.setattr(
        vllm_client,
        "packed_nccl_broadcast_producer",
        lambda iterator, group, **kwargs: group.broadcast(iterator, **kwargs),
        raising=False,
    )
    monkeypatch.setattr(BoundedVLLMClient, "retries", BoundedVLLMClient.retries.new(backoff_factor=0))
    monkeypatch.setattr(vllm_server, "CONNECT_SECONDS", TIMEOUT)


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    with fake_vllm_server() as server:
        yield server


@pytest.fixture
def client(server: FakeVLLMServer) -> BoundedVLLMClient:
    client = BoundedVLLMClient(base_url=server.url, request_timeout=TIMEOUT)
    client.init_communicator()
    server.requests.clear()
    return client


def sync(client: BoundedVLLMClient) -> None:
    metadata = [(name, "float32", list(tensor.shape)) for name, tensor in WEIGHTS.items()]
    client.update_named_params(metadata, iter(WEIGHTS.items()))


def test_a_sound_server_generates_and_takes_weights(server: FakeVLLMServer, client: BoundedVLLMClient) -> None:
    output = client.generate([[3, 4], [5]], n=3, max_tokens=8)
    assert output["prompt_ids"] == [[3, 4], [5]]
    assert len(output["completion_ids"]) == len(output["logprobs"]) == 6
    sync(client)
    assert server.updates == 1
    assert client.communicator.sent == list(WEIGHTS)


@pytest.mark.parametrize(
    ("fault", "message", "times"),
    [
        ("hang", r"did not answer /v1/completions within 1 s \(vllm_request_timeout\)", 1),
        ("500", "answered /v1/completions with 500: EngineDeadError: out of memory", 4),
        ("400", "answered /v1/completions with 400: EngineDeadError", 1),
        ("garbage", "answered /v1/completions with what is no JSON", 1),
        ("unknown", "gave completions in an unknown form", 1),
        ("few", "gave 5 completions instead of 6", 1),
    ],
)
def test_a_fault_is_one_clear_error_in_bounded_time(
    server: FakeVLLMServer, client: BoundedVLLMClient, fault: str, message: str, times: int
) -> None:
    server.faults[COMPLETIONS] = fault
    start = time.monotonic()
    with pytest.raises(VLLMServerError, match=message) as caught:
        client.generate([[3, 4], [5]], n=3, max_tokens=8)
    assert time.monotonic() - start < 10 * TIMEOUT
    assert server.requests.count(COMPLETIONS) == times
    assert server.url in str(caught.value) and "resume_from_checkpoint" in str(caught.value)


def test_a_server_that_is_down_is_an_error(server: FakeVLLMServer, client: BoundedVLLMClient) -> None:
    server.stop()
    with pytest.raises(VLLMServerError, match="cannot be reached or broke off"):
        client.generate([[3]], n=2)
    with pytest.raises(VLLMServerError, match="cannot be reached or broke off"):
        sync(client)
    server.start_again()


def test_a_broken_connection_is_tried_again(server: FakeVLLMServer, client: BoundedVLLMClient) -> None:
    server.faults[COMPLETIONS] = "break"
    assert len(client.generate([[3, 4]], n=2)["completion_ids"]) == 2
    assert server.requests.count(COMPLETIONS) == 2


def test_trl_takes_completions_of_a_restarted_server(server: FakeVLLMServer) -> None:
    """The fault that the next test is about. When this fails, TRL notices it itself."""
    client = vllm_client.VLLMClient(base_url=server.url)
    client.init_communicator()
    server.faults[COMPLETIONS] = "restart"
    assert len(client.generate([[3, 4]], n=2)["completion_ids"]) == 2


def test_completions_of_a_restarted_server_are_refused(server: FakeVLLMServer, client: BoundedVLLMClient) -> None:
    before = server.instance_id
    server.faults[COMPLETIONS] = "restart"
    with pytest.raises(VLLMServerError, match=rf"was restarted \(its instance_id {before} is now"):
        client.generate([[3, 4]], n=2)
    assert server.requests.count(COMPLETIONS) == 2, "the new server did answer"


def test_weights_are_not_sent_to_a_restarted_server(server: FakeVLLMServer, client: BoundedVLLMClient) -> None:
    server.stop()
    server.start_again()
    with pytest.raises(VLLMServerError, match="the trained weights are lost"):
        sync(client)
    assert "/start_weight_update" not in server.requests
    assert client.communicator.sent == []


@pytest.mark.parametrize("fault", ["500", "break", "hang"])
def test_a_fault_during_the_broadcast_ends_it(server: FakeVLLMServer, client: BoundedVLLMClient, fault: str) -> None:
    client.communicator.stuck = True
    server.faults["/update_weights"] = fault
    with pytest.raises(VLLMServerError, match="/update_weights"):
        sync(client)
    assert client.communicator.destroyed.is_set()
    assert server.requests.count("/update_weights") == 1, "sent again, it would wait for another broadcast"


@pytest.mark.parametrize(
    ("fault", "message"),
    [("503", "is not healthy after 0.1 s"), ("hang", r"cannot be reached .* after 0.1 s \(vllm_server_timeout\)")],
)
def test_a_server_that_does_not_start_is_an_error(server: FakeVLLMServer, fault: str, message: str) -> None:
    server.faults["/health"] = fault
    with pytest.raises(VLLMServerError, match=message):
        BoundedVLLMClient(base_url=server.url, connection_timeout=0.1, request_timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        ("/v1/models", "hang", "did not answer /v1/models"),
        ("/init_weight_transfer_engine", "500", "answered /init_weight_transfer_engine with 500"),
        ("/server_info", "garbage", "answered /server_info in an unknown form"),
        ("/server_info", "unknown", "answered /server_info in an unknown form"),
    ],
)
def test_faults_at_the_start_are_errors(server: FakeVLLMServer, path: str, fault: str, message: str) -> None:
    server.faults[path] = fault
    with pytest.raises(VLLMServerError, match=message):
        BoundedVLLMClient(base_url=server.url, request_timeout=TIMEOUT).init_communicator()


def test_what_trl_says_about_missing_endpoints_stays(server: FakeVLLMServer) -> None:
    server.faults["/server_info"] = "404"
    with pytest.raises(RuntimeError, match="Restart it with `VLLM_SERVER_DEV_MODE=1`"):
        BoundedVLLMClient(base_url=server.url, request_timeout=TIMEOUT).init_communicator()


def test_a_server_without_an_instance_is_refused(server: FakeVLLMServer) -> None:
    server.instance_id = ""
    with pytest.raises(VLLMServerError, match="tells no instance_id"):
        BoundedVLLMClient(base_url=server.url, request_timeout=TIMEOUT).init_communicator()


class FailAfter(TrainerCallback):
    """Lets the server fail after a step."""

    def __init__(self, server: FakeVLLMServer, step: int, fault: str) -> None:
        self.server, self.step, self.fault = server, step, fault

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.server.faults[COMPLETIONS] = self.fault


@pytest.mark.parametrize(
    ("fault", "message"), [("hang", "did not answer /v1/completions"), ("restart", "was restarted")]
)
def test_training_stops_and_resumes_from_an_intact_checkpoint(
    tmp_path: Path, server: FakeVLLMServer, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr(sagc_trainer, "colocated_on_cpu", lambda _: nullcontext())  # refuses servers, for NCCL's sake

    def build(callbacks: list[TrainerCallback]) -> Any:
        return tiny_trainer(
            tmp_path,
            arguments={"callbacks": callbacks},
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.url,
            vllm_request_timeout=TIMEOUT,
            save_strategy="steps",
            save_steps=1,
            rho=0.2,
        )

    trainer = build([FailAfter(server, 2, fault)])
    with pytest.raises(VLLMServerError, match=message):
        trainer.train()
    assert trainer.state.global_step == 2
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "trainer_state.json").is_file() and (checkpoint / sagc_trainer.STATE_FILE).is_file()
    server.stop()
    server.start_again()
    resumed = build([])
    server.requests.clear()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    assert server.requests.index("/update_weights") < server.requests.index(COMPLETIONS), "trained weights come first"
    assert server.updates == 2


def test_the_name_is_given_back() -> None:
    original = vllm_generation.VLLMClient
    with pytest.raises(ZeroDivisionError), bounded_server(TIMEOUT):
        assert vllm_generation.VLLMClient is not original
        raise ZeroDivisionError
    assert vllm_generation.VLLMClient is original
