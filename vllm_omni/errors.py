"""Every error this package raises on purpose.

    Exception
    ├── OmniRequestError               one request is at fault; everything else goes on
    │   ├── InvalidParameterError      a value that is not allowed (also a ValueError)
    │   ├── ModalityNotSupportedError  an input or output kind that the model does not have
    │   ├── DeadlineExceededError      the request's own deadline passed
    │   └── StageExecutionError        preparing, stepping or decoding this request failed
    └── EngineError                    the engine, not a request, is at fault
        ├── ConfigError                a setting that is not allowed (also a ValueError)
        │   └── ConfigFileError        … in a file: with its name and line
        ├── ModelLoadError             the checkpoint is missing, broken or of an unknown kind
        ├── CacheAllocationError       a cache allocation does not fit its byte budget
        └── EngineDeadError            the engine or its workers are gone
            └── WorkerDeadError        … a worker process: with its exit code

Every message says what was wrong, with which value, and what is allowed.
"""

from __future__ import annotations

_MAX_SHOWN = 200  # characters of a value in a message


def show_value(value: object) -> str:
    """A value in a message; whatever somebody made of it, it is short and there is one."""
    try:
        shown = repr(value)
    except ValueError:  # a whole number too long to write down
        return "a number too long to show"
    except RecursionError:
        return "a value too deep to show"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


class _NotAllowedError(ValueError):
    """What a refused parameter and a refused setting have in common."""

    def __init__(self, param: str, value: object, allowed: str) -> None:
        super().__init__(f"{param}={show_value(value)} is not allowed: {allowed}")
        self.param = param


class OmniRequestError(Exception):
    """One request cannot be served."""


class InvalidParameterError(OmniRequestError, _NotAllowedError):
    """A request parameter has a value that is not allowed."""


class ModalityNotSupportedError(OmniRequestError):
    """The model has no such input or output modality."""


class DeadlineExceededError(OmniRequestError):
    """The request did not finish within its deadline."""


class StageExecutionError(OmniRequestError):
    """A stage failed while it worked on this request."""


class EngineError(Exception):
    """The engine itself cannot do its work."""


class ConfigError(EngineError, _NotAllowedError):
    """A setting has a value that is not allowed."""


class ConfigFileError(ConfigError):
    """A setting in a file is not allowed, or the file cannot be read.

    Args:
        where: the file and, where one is to blame, the line: "stages.yaml:7".
    """

    def __init__(self, where: str, param: str, problem: str) -> None:
        Exception.__init__(self, f"{where}: {problem}")
        self.param = param


class ModelLoadError(EngineError):
    """A checkpoint cannot be loaded."""


class CacheAllocationError(EngineError):
    """A cache allocation does not fit the byte budget."""


class EngineDeadError(EngineError):
    """The engine, or a worker it needs, has ended."""


class WorkerDeadError(EngineDeadError):
    """A worker process has ended."""

    def __init__(self, rank: int, exit_code: int | None) -> None:
        super().__init__(f"diffusion worker {rank} ended with exit code {exit_code}")
        self.exit_code = exit_code
