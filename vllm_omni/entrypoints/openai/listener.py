"""The socket that a server listens on: opened first, before anything that takes long."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket

from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.errors import ConfigError, EngineError

MIN_KEY_CHARS = 8  # of a key that strangers could try to guess

_BACKLOG = 2048
_OTHER_FILES = 512  # sockets between processes, libraries, connections that are being refused


def open_socket(config: ServerConfig) -> socket.socket:
    """Listen at once, so that a port in use is known before any model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # TCP by name: asyncio switches Nagle's algorithm off only where it knows that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        _check_exposure(config, listener.getsockname()[0])
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason += "; --port takes another, and 0 a free one"
        raise EngineError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def fit_to_file_limit(max_connections: int) -> int:
    """As many connections as this process may have files, once it has asked for what it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    return min(max_connections, max(soft - _OTHER_FILES, soft // 2))


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to an address; a name is no address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _check_exposure(config: ServerConfig, address: str) -> None:
    """What was bound, not what was written, says who can connect: a name can mean anything."""
    if is_loopback(address):
        return
    if any(len(key) < MIN_KEY_CHARS for key in config.api_keys):
        allowed = f"others can reach {address}: each has at least {MIN_KEY_CHARS} characters"
        raise ConfigError("api_keys", "…", allowed)
    if not (config.api_keys or config.allow_no_key):
        raise ConfigError(
            "host",
            config.host,
            f"others can reach {address} and there is no API key: "
            "give --api-key, or --allow-no-key if that is meant",
        )
