"""What an operator sets about the server; `vllm-omni serve` makes an option of every field."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from vllm_omni.config import (
    check_choice,
    check_each,
    check_is,
    check_seconds,
    check_whole,
    setting,
)
from vllm_omni.errors import ConfigError, InvalidParameterError
from vllm_omni.params import DiffusionParams
from vllm_omni.step_cache import CacheParams, parse_cache

NO_CACHE = "none"
DEFAULT_COST = 100
DEFAULT_AREA = 16
DEFAULT_QUEUED = 10
DEFAULT_RUNNING = 2

_OWNER_CHARS = 16

LogFormat = Literal["plain", "json"]

_MAY_BE_0 = ("max_cost", "max_pixels", "max_queued_cost", "max_num_running")

# Headings of --help.
_WHERE = "where it listens"
_WHO = "who may use it"
_LIMITS = "how much one request may ask for"
_TIMES = "how long things last"
_LOGS = "what it tells"


@dataclass(frozen=True)
class ServerConfig:
    """Where it listens, who may use it, and how much one request may ask for."""

    # where
    host: str = setting("127.0.0.1", "address to listen on", _WHERE)
    port: int = setting(8000, "port to listen on; 0 takes a free one", _WHERE)
    served_model_name: str = setting("", "name in /v1/models; the model's own when empty", _WHERE)
    tool_call_parser: str = setting(
        "hermes", "vLLM's parser of tool calls in a chat; empty: tools are refused", _WHERE
    )
    ui: bool = setting(False, "mount the page at /ui (needs the extra `ui`)", _WHERE)

    # who
    api_keys: Sequence[str] = setting(
        (),
        "key that clients must send; may be given several times (also VLLM_OMNI_API_KEYS)",
        _WHO,
        is_secret=True,
    )
    allow_no_key: bool = setting(
        False,
        "listen on an address that others reach, without a key; whoever can connect may draw",
        _WHO,
    )
    allowed_origins: Sequence[str] = setting(
        (), "web page origins that may call the API (CORS); may be given several times", _WHO
    )
    allowed_hosts: Sequence[str] = setting(
        (), "further Host names to answer to without a key; may be given several times", _WHO
    )

    # how much
    max_cost: int = setting(
        0,
        "most pixels x steps x n of one request, guidance counts twice; "
        f"0: that of {DEFAULT_COST} pictures of the model's own size and steps",
        _LIMITS,
    )
    max_pixels: int = setting(
        0,
        f"most pixels of one picture; 0: {DEFAULT_AREA} times those of the model's own size",
        _LIMITS,
    )
    max_n: int = setting(10, "most pictures of one request", _LIMITS)
    max_num_queued: int = setting(
        256, "most requests at once, waiting or running; then 429", _LIMITS
    )
    max_queued_cost: int = setting(
        0,
        f"most that all of them cost together; then 429; 0: {DEFAULT_QUEUED} times max_cost",
        _LIMITS,
    )
    max_num_running: int = setting(
        0,
        "most pictures that the engine gets at once, the next by key and priority; "
        f"0: {DEFAULT_RUNNING} times max_num_seqs",
        _LIMITS,
    )
    max_prompt_chars: int = setting(16_384, "most characters of a prompt", _LIMITS)
    max_body_bytes: int = setting(16 * 2**20, "most bytes of a request's body", _LIMITS)
    max_header_bytes: int = setting(64 * 2**10, "most bytes of a request's headers", _LIMITS)
    max_connections: int = setting(10_000, "most connections at once; then 503", _LIMITS)
    max_input_images: int = setting(4, "most pictures in one chat", _LIMITS)
    max_input_pixels: int = setting(4096 * 4096, "most pixels of a picture that is sent", _LIMITS)
    max_tokens: int = setting(4096, "most tokens that one chat may write", _LIMITS)
    fetch_images: bool = setting(
        False,
        "fetch pictures that are named by an address: only public ones, no redirects",
        _LIMITS,
    )

    # how long
    request_timeout: float = setting(600.0, "seconds a request may take; then 504", _TIMES)
    receive_timeout: float = setting(
        60.0, "seconds in which a request must have arrived; then 408", _TIMES
    )
    send_timeout: float = setting(
        60.0, "seconds in which a client must read some of its answer; then it is cut off", _TIMES
    )
    url_ttl: float = setting(3600.0, "seconds for which a picture's url works", _TIMES)
    max_files_bytes: int = setting(
        512 * 2**20, "most bytes of pictures kept for their urls, and as many for jobs", _TIMES
    )
    job_timeout: float = setting(86_400.0, "seconds a job may take, waiting included", _TIMES)
    job_ttl: float = setting(3600.0, "seconds for which a finished job is kept", _TIMES)
    state_dir: str = setting(
        "", "folder in which jobs outlive the server; empty: they end with it", _TIMES
    )
    idempotency_ttl: float = setting(
        3600.0, "seconds for which an answer is kept for its Idempotency-Key", _TIMES
    )
    max_jobs: int = setting(1000, "most jobs kept, finished ones included", _TIMES)
    shutdown_timeout: float = setting(30.0, "seconds for running requests after SIGTERM", _TIMES)

    # how it works
    cache: str = setting(
        NO_CACHE,
        "step cache of requests that name none: first_block, tea, taylor, or fields in JSON",
        _LIMITS,
    )

    # what it says
    log_format: LogFormat = setting("plain", "of log lines", _LOGS)
    otlp_traces_endpoint: str = setting("", "where OpenTelemetry spans go; empty: nowhere", _LOGS)

    def __post_init__(self) -> None:
        check_is("host", self.host, str)
        for name in ("port", *_MAY_BE_0):
            check_whole(name, getattr(self, name), 0)
        if self.port > 65535:
            raise ConfigError("port", self.port, "at most 65535")
        for field in fields(self):
            if field.name.startswith("max_") and field.name not in _MAY_BE_0:
                check_whole(field.name, getattr(self, field.name), 1)
            if field.name.endswith(("_timeout", "_ttl")):
                check_seconds(field.name, getattr(self, field.name))
        check_choice("log_format", self.log_format, get_args(LogFormat))
        self.read_cache()
        for name in ("api_keys", "allowed_origins", "allowed_hosts"):
            object.__setattr__(self, name, check_each(name, getattr(self, name), str))
        if not all(re.fullmatch(r"[!-~]+", key) for key in self.api_keys):
            allowed = "each has characters of ASCII, without spaces"
            raise ConfigError("api_keys", "…", allowed)
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/*\s]+", origin):
                allowed = "a scheme and a host, such as https://example.com, and no wildcard"
                raise ConfigError("allowed_origins", origin, allowed)

    @property
    def owners(self) -> tuple[str, ...]:
        """What the keys' requests and jobs are known by."""
        return tuple(dict.fromkeys(map(get_owner, self.api_keys)))

    def read_cache(self) -> CacheParams | None:
        """The step cache of requests that name none."""
        given: Any = None if self.cache == NO_CACHE else self.cache
        try:
            is_json = given is not None and given.startswith("{")
            return parse_cache(json.loads(given) if is_json else given)
        except (ValueError, InvalidParameterError) as error:
            raise ConfigError("cache", self.cache, str(error)) from error

    def with_defaults(self, params: DiffusionParams, max_num_seqs: int = 32) -> ServerConfig:
        """With limits that suit a model, where none were given.

        Args:
            params: the model's own.
            max_num_seqs: pictures in one step of its engine.
        """
        assert params.height and params.width and params.num_inference_steps
        pixels = params.height * params.width
        max_cost = self.max_cost or DEFAULT_COST * pixels * params.num_inference_steps
        return replace(
            self,
            max_pixels=self.max_pixels or DEFAULT_AREA * pixels,
            max_cost=max_cost,
            max_queued_cost=self.max_queued_cost or DEFAULT_QUEUED * max_cost,
            max_num_running=self.max_num_running or DEFAULT_RUNNING * max_num_seqs,
        )


def get_owner(key: str) -> str:
    """What a key's requests and jobs are known by; the key cannot be read from it."""
    return digest_key(key).hex()[:_OWNER_CHARS]


def digest_key(key: str) -> bytes:
    """What is compared instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
