"""Where a server may listen, and who could then reach it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.listener import is_loopback, open_socket
from vllm_omni.errors import ConfigError, EngineError

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_no_key_no_strangers(host: str) -> None:
    with pytest.raises(ConfigError, match=r"others can reach .* and there is no API key"):
        open_socket(ServerConfig(host=host, port=0))
    for allowed in ({"api_keys": KEYS}, {"allow_no_key": True}):
        open_socket(ServerConfig(host=host, port=0, **allowed)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    with open_socket(ServerConfig(host=host, port=0)) as listener:
        assert is_loopback(listener.getsockname()[0])


def test_a_key_that_strangers_could_guess() -> None:
    keys = ("1234567", KEYS[0])
    open_socket(ServerConfig(port=0, api_keys=keys)).close()  # nobody else can connect
    with pytest.raises(ConfigError, match=r"others can reach .*: each has at least 8") as caught:
        open_socket(ServerConfig(host="0.0.0.0", port=0, api_keys=keys))
    assert keys[0] not in str(caught.value)


def test_names_that_only_look_local() -> None:
    assert not is_loopback("127.evil.example") and not is_loopback("localhost")
    assert not is_loopback("::ffff:1.2.3.4") and not is_loopback("128.0.0.1")


@pytest.mark.parametrize("host", ["no such host", "nowhere.invalid", "1.2.3.4", "x" * 300])
def test_address_that_is_not_there(host: str) -> None:
    with pytest.raises(EngineError, match="cannot listen on"):
        open_socket(ServerConfig(host=host, port=0, api_keys=KEYS))


def test_port_in_use() -> None:
    with open_socket(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}: Address already in use"):
            open_socket(ServerConfig(port=port))


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 20_000, (10_000, 10_512)), (256, 4096, (3584, 4096)), (64, 600, (300, 600))],
)
def test_files_that_connections_need(soft: int, hard: int, expected: tuple[int, int]) -> None:
    """As many as the system allows, and in a process of its own: it cannot be taken back."""
    code = (
        "import resource\n"
        "from vllm_omni.entrypoints.openai.listener import fit_to_file_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "print(fit_to_file_limit(10_000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(number) for number in expected]
