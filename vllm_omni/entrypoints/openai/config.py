"""What an operator sets about the server; `vllm-omni serve` makes an option of every field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_omni.config import setting

LogFormat = Literal["plain", "json"]


@dataclass(frozen=True)
class ServerConfig:
    """Where it listens, who may use it, and how much one request may ask for."""

    # where
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    served_model_name: str = setting("", "name in /v1/models; the model's own when empty")
    ui: bool = setting(False, "mount the page at /ui (needs the extra `ui`)")

    # who
    api_keys: Sequence[str] = setting(
        (), "key that clients must send; may be given several times (also VLLM_OMNI_API_KEYS)"
    )
    allow_no_key: bool = setting(
        False, "listen on an address that others reach, without a key; whoever can connect may draw"
    )
    allowed_origins: Sequence[str] = setting(
        (), "web page origins that may call the API (CORS); may be given several times"
    )
    allowed_hosts: Sequence[str] = setting(
        (), "further Host names to answer to without a key; may be given several times"
    )

    # how much
    max_cost: int = setting(
        100 * 1024 * 1024 * 50, "most pixels x steps x n of one request; guidance counts twice"
    )
    max_n: int = setting(10, "most pictures of one request")
    max_num_queued: int = setting(256, "most requests at once, waiting or running; then 429")
    max_prompt_chars: int = setting(16_384, "most characters of a prompt")
    max_body_bytes: int = setting(16 * 2**20, "most bytes of a request's body")
    max_header_bytes: int = setting(64 * 2**10, "most bytes of a request's headers")
    max_input_images: int = setting(4, "most pictures in one chat")
    max_input_pixels: int = setting(4096 * 4096, "most pixels of a picture that is sent")
    max_tokens: int = setting(4096, "most tokens that one chat may write")
    fetch_images: bool = setting(
        False, "fetch pictures that are named by an address: only public ones, no redirects"
    )

    # how long
    request_timeout: float = setting(600.0, "seconds a request may take; then 504")
    url_ttl: float = setting(3600.0, "seconds for which a picture's url works")
    max_files_bytes: int = setting(512 * 2**20, "most bytes of pictures kept for their urls")
    job_ttl: float = setting(3600.0, "seconds for which a finished job is kept")
    max_jobs: int = setting(1000, "most jobs kept, finished ones included")
    shutdown_timeout: float = setting(30.0, "seconds for running requests after SIGTERM")

    # what it says
    log_format: LogFormat = setting("plain", "of log lines")
    otlp_traces_endpoint: str = setting("", "where OpenTelemetry spans go; empty: nowhere")
