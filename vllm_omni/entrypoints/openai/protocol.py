"""Bodies and answers of our own HTTP routes, in OpenAI's shapes; unknown parameters are refused.

What is said here, types and bounds, is what the served OpenAPI document says. Limits that an
operator sets are checked where they are known, in `limits.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_omni.params import MAX_OUTPUTS_PER_PROMPT, MAX_SEED, MAX_SIDE, MAX_STEPS, OutputMode

OutputFormat = Literal["png", "jpeg", "webp"]
Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
DrawnQuality = Literal["low", "medium", "high", "xhigh", "max"]
Background = Literal["auto", "opaque", "transparent"]
ResponseFormat = Literal["b64_json", "url"]
JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]

MAX_PARTIAL_IMAGES = 3
_MAX_EXACT = 2**53  # a float has all whole numbers up to here
MAX_PARAMETERS = 100  # of a body; no route has as many
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # no strings, no booleans
_SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"


def _check_size(size: str) -> str:
    if re.fullmatch(_SIZE, size) is None:
        raise PydanticCustomError("size", "WIDTHxHEIGHT in pixels, such as 512x768, or auto")
    return size


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Say in the OpenAPI document what `Body` does."""
    for name, value in schema.get("properties", {}).items():
        choices = value.get("anyOf", [value])
        if name not in schema.get("required", ()) and {"type": "null"} not in choices:
            notes = {key: value.pop(key) for key in ("default", "description") if key in value}
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}], **notes}


def _to_whole(value: Any, num_levels: int = 2) -> Any:
    """1.0 is as whole as 1: the document and some clients' JSON do not tell them apart."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return int(value)
    if isinstance(value, list) and num_levels:  # token ids, or lists of them
        return [_to_whole(each, num_levels - 1) for each in value]
    return value


class Body(BaseModel):
    """Of a request: an unknown parameter is an error that names it.

    A parameter that is null was not given: OpenAI's clients send it so.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra=_allow_nulls)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_PARAMETERS:  # or each gets an error of its own, for seconds
            raise PydanticCustomError("too_many_parameters", f"at most {MAX_PARAMETERS} parameters")
        return {
            name: _to_whole(value)
            for name, value in data.items()
            if value is not None or name not in cls.model_fields
        }


class PictureParameters(Body):
    """How to draw and how to give the picture, wherever one is asked for."""

    size: Annotated[str, AfterValidator(_check_size)] = Field(
        "auto",
        json_schema_extra={"pattern": _SIZE},  # which as the answer would say little
        description=f"WIDTHxHEIGHT in pixels, multiples of 16 up to {MAX_SIDE}; auto: the model's.",
    )
    quality: Quality = Field(
        "auto",
        description=(
            "How many steps: auto, standard and medium are the model's own number; low is half of "
            "it, high and hd 1.5 times, xhigh 2 times, max 3 times. num_inference_steps goes "
            "before it."
        ),
    )
    background: Background = Field("auto", description="transparent is refused: no model can yet.")
    output_format: OutputFormat = "png"
    output_compression: StrictInt = Field(
        100, ge=0, le=100, description="Quality in percent, of jpeg and webp; png has no loss."
    )

    # beyond OpenAI's
    negative_prompt: str | None = Field(
        None, description="What not to draw; turns guidance on (true_cfg_scale above 1)."
    )
    num_inference_steps: StrictInt | None = Field(None, ge=1, le=MAX_STEPS)
    true_cfg_scale: Finite | None = Field(
        None, ge=0, le=100, description="Guidance; above 1 it is on, and a step costs twice."
    )
    priority: StrictInt = Field(
        0, ge=-(2**31), le=2**31 - 1, description="Of one key's requests, lower goes first."
    )
    output_mode: OutputMode = Field(
        OutputMode.PIXELS, description="Only pixels and pixels_and_mask can be had over HTTP."
    )
    cache: Any = Field(
        None,
        description=(
            'The step cache: a method ("first_block", "tea", "taylor"), an object with its fields, '
            'such as {"method": "tea", "threshold": 0.2}, or "none"; without it, the server\'s own.'
        ),
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]},
    )
    lora: Any = Field(None, description="Not supported yet.")


class ImageParameters(PictureParameters):
    """What generation, editing and jobs have in common."""

    prompt: str = Field(min_length=1, description="What to draw.")
    model: str | None = Field(None, description="The served model, or nothing.")
    n: StrictInt = Field(1, ge=1, le=MAX_OUTPUTS_PER_PROMPT, description="How many pictures.")
    response_format: ResponseFormat = Field(
        "b64_json", description="url: served by this server for a limited time."
    )
    user: str | None = Field(None, max_length=256, description="Not used by this server.")
    safety_identifier: str | None = Field(
        None, max_length=256, description="Not used by this server."
    )
    moderation: Literal["auto", "low"] = Field("auto", description="This server does not moderate.")

    # beyond OpenAI's
    seed: StrictInt | None = Field(
        None, ge=0, le=MAX_SEED, description="Picture i is drawn with seed + i; drawn if not given."
    )
    timeout: Finite | None = Field(
        None, gt=0, le=1e9, description="Seconds from arrival; then 504 is the answer."
    )
    rewrite_prompt: StrictBool = Field(
        False, description="Let the model write a fuller prompt first; it is the revised_prompt."
    )


class ImageGenerationRequest(ImageParameters):
    """POST /v1/images/generations."""

    stream: StrictBool = Field(False, description="Server-sent events instead of one answer.")
    partial_images: StrictInt = Field(
        0, ge=0, le=MAX_PARTIAL_IMAGES, description="Previews of each picture; needs stream."
    )


class ImageJobRequest(ImageParameters):
    """POST /v1/images/jobs."""


class Image(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    seed: int  # with which this picture can be made again, alone


class TokenDetails(BaseModel):
    text_tokens: int = 0
    image_tokens: int = 0


class Usage(BaseModel):
    """Tokens of the prompts, and those of what was made: pictures' latents, a rewritten prompt."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class Metrics(BaseModel):
    """Where the time went, in seconds."""

    num_steps: int
    num_rows: int  # of these steps: two for a guided one
    num_skipped_rows: int  # of the rows, taken by the step cache
    queue_time: float
    total_time: float


class ImagesResponse(BaseModel):
    created: int
    background: Background
    output_format: OutputFormat
    quality: DrawnQuality
    size: str
    data: list[Image]
    usage: Usage
    metrics: Metrics


class PartialImageEvent(BaseModel):
    """A preview on the way; `image_index` says of which of n pictures."""

    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"
    b64_json: str
    partial_image_index: int
    image_index: int
    step: int
    num_steps: int
    created_at: int
    size: str
    quality: DrawnQuality
    background: Background
    output_format: OutputFormat


class CompletedEvent(BaseModel):
    """One picture, done; `usage` and `metrics` are those of the whole request."""

    type: Literal["image_generation.completed"] = "image_generation.completed"
    b64_json: str | None = None
    url: str | None = None
    image_index: int
    seed: int
    revised_prompt: str | None = None
    created_at: int
    size: str
    quality: DrawnQuality
    background: Background
    output_format: OutputFormat
    usage: Usage
    metrics: Metrics


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorInfo


class Job(BaseModel):
    """A picture, or several, that nobody holds a connection for."""

    id: str
    object: Literal["image.job"] = "image.job"
    status: JobStatus
    progress: int = Field(ge=0, le=100)  # percent of the steps
    queue_position: int | None = None  # 0: next; None: not waiting any more
    estimated_seconds: float | None = None  # until it is done; None: it has ended
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None  # when it is forgotten; set at its end
    result: ImagesResponse | None = None
    error: ErrorInfo | None = None


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Job]
    has_more: bool
