"""What a running server listens on: one port, and nothing else that anybody could reach."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from tests.serving import ServerProcess
from vllm_omni import envs
from vllm_omni.engine.sockets import SocketFolder

GARBAGE = (
    pickle.dumps({"a": 1}),
    b"\xc1" * 1000,
    os.urandom(4096),
    b"\xff" * 2**20,
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(54),  # ZMQ's greeting
)


def get_processes(server: ServerProcess) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def get_listeners(server: ServerProcess) -> dict[tuple[str, int], str]:
    """Each TCP address that is listened on, and the process's name."""
    return {
        (each.laddr.ip, each.laddr.port): process.cmdline()[0]
        for process in get_processes(server)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def get_sockets(server: ServerProcess) -> set[str]:
    """Paths of all sockets between processes that can be connected to."""
    paths = {
        str(each.laddr)
        for process in get_processes(server)
        for each in process.net_connections("unix")
        if each.laddr
    }
    return {path for path in paths if path.startswith("/") and Path(path).exists()}


def draw(server: ServerProcess) -> bytes:
    body = {"prompt": "a star", "size": "64x64", "num_inference_steps": 1, "seed": 3}
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    image: bytes = answer.json()["data"][0]["b64_json"].encode()
    return image


def test_one_port_for_others(server: ServerProcess) -> None:
    listeners = get_listeners(server)
    assert ("127.0.0.1", server.port) in listeners
    others = {address: name for address, name in listeners.items() if address[1] != server.port}
    # torch's own, inside vLLM, for processes that would work together with this one.
    assert set(others.values()) <= {"vllm-omni ar:0"}
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in listeners)


def test_sockets_between_processes_cannot_be_reached(server: ServerProcess) -> None:
    """Only that of Python's forkserver is left, in a folder of this user's."""
    for path in map(Path, get_sockets(server)):
        assert path.name.startswith("listener-"), path
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        assert (mode, path.parent.stat().st_uid) == (0o700, os.getuid())


def test_garbage_at_every_port_changes_nothing(server: ServerProcess) -> None:
    before = draw(server)
    pids = [process.pid for process in get_processes(server)]
    for host, port in get_listeners(server):
        for garbage in GARBAGE:
            with suppress(ConnectionError), socket.create_connection((host, port), 10) as other:
                other.sendall(garbage)
    time.sleep(0.5)
    assert [process.pid for process in get_processes(server)] == pids
    assert draw(server) == before
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert set(health["stages"].values()) == {"ok"}


def test_a_socket_that_is_taken_away_stays_connected() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as ours:
        folder = SocketFolder()
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        address = folder.make_address("output")
        ours.bind(address)
        with context.socket(zmq.PUSH) as theirs, context.socket(zmq.PUSH) as late:
            theirs.connect(address)
            theirs.send(b"1")
            assert ours.recv() == b"1"
            folder.remove()
            folder.remove()
            assert not folder.path.exists()
            late.setsockopt(zmq.LINGER, 0)
            late.connect(address)
            with pytest.raises(zmq.Again):
                late.send(b"garbage", zmq.NOBLOCK)
                time.sleep(0.2)
                ours.recv(zmq.NOBLOCK)
            theirs.send(b"2")
            assert ours.recv() == b"2"


def test_groups_of_processes_stay_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    envs.keep_sockets_local()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")  # an operator's own choice
    envs.keep_sockets_local()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
