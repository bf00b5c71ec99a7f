"""Bodies and answers of chats and completions, in OpenAI's shapes; unknown parameters are refused.

What vLLM would also take, but ignores here or lets a client reach into the server with (templates,
processor arguments, embeddings, ids, salts), is not named and so refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_omni.entrypoints.openai.protocol import Body, Finite, PictureParameters
from vllm_omni.params import MAX_SEED

Role = Literal["system", "developer", "user", "assistant", "tool"]
Modality = Literal["text", "image", "audio"]

MAX_MESSAGES = 512
MAX_PARTS = 256  # of one message
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 4
MAX_TOKENS = 2**31 - 1  # of what can be written down; what may be asked for is in the settings
MAX_PROMPTS = 64
MAX_CHOICES = 256

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.:-]+$")]
Words = Annotated[str, Field(max_length=2**24)]  # also: no half of a character
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)]
TokenCount = Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)]


def _fail(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{what}", {"what": message})


# --- what a client sends ---


class ImageURL(Body):
    url: str = Field(
        min_length=1, description="data:image/png;base64,…; addresses only where it is allowed."
    )
    detail: Literal["auto", "low", "high"] = Field(
        "auto", description="Pictures are read as they are, whatever this says."
    )


class ContentPart(Body):
    """A piece of a message: words or a picture."""

    type: Literal["text", "image_url"]
    text: Words | None = None
    image_url: ImageURL | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        other = "text" if self.type == "image_url" else "image_url"
        if getattr(self, self.type) is None:
            raise _fail(f"a part of type {self.type} needs {self.type}")
        if getattr(self, other) is not None:
            raise _fail(f"a part of type {self.type} cannot hold {other}")
        return self


def _to_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# A list in any case, so that errors name the part that is wrong, and not a branch of a union.
Content = Annotated[
    list[ContentPart],
    Field(min_length=1, max_length=MAX_PARTS),
    BeforeValidator(_to_parts, json_schema_input_type=str | list[ContentPart]),
]


class FunctionCall(Body):
    name: Name
    arguments: Words = Field(description="JSON, as a string.")


class ToolCall(Body):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ImagePart(Body):
    """A picture of an answer."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL
    seed: StrictInt | None = None  # with which this picture can be made again


class Message(Body):
    """One turn of a chat. An answer of this server can be sent back as it is."""

    role: Role
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    images: list[ImagePart] | None = Field(
        None, max_length=MAX_PARTS, description="Of an answer; read like pictures in its content."
    )
    # Clients that send an answer back send these too.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_assistant = self.role == "assistant"
        for name in ("tool_calls", "images"):
            if getattr(self, name) is not None and not is_assistant:
                raise _fail(f"only a message of the assistant has {name}")
        if self.content is None and not (is_assistant and (self.tool_calls or self.images)):
            raise _fail("content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise _fail("a message of a tool needs tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise _fail("only a message of a tool has tool_call_id")
        return self


class StreamOptions(Body):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Function(Body):
    name: Name
    description: Words | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: StrictBool | None = Field(
        None, description="Whether the arguments must be as the schema says."
    )


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


def _check_tool_choice(choice: Any) -> Any:
    if choice in ("none", "auto", "required"):
        return choice
    if not isinstance(choice, dict):
        raise _fail("none, auto, required, or the name of a function")
    return NamedTool.model_validate(choice).model_dump()


ToolChoice = Annotated[
    Any,
    BeforeValidator(
        _check_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool,
    ),
]


class JSONSchema(Body):
    name: Name
    description: Words | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _fail("json_schema belongs to type json_schema, and only to it")
        return self


class StructuredOutputs(Body):
    """What the text has to be: one of these (vLLM's own parameter)."""

    choice: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES
    )
    regex: str | None = Field(None, min_length=1)
    json_: dict[str, Any] | None = Field(None, alias="json")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in (self.choice, self.regex, self.json_)) != 1:
            raise _fail("give one of choice, regex and json")
        return self


def _to_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_to_list, json_schema_input_type=str | list[str]),
]


def _check_logit_bias(bias: dict[str, float]) -> dict[str, float]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in bias):
        raise _fail("its keys are token ids")
    return bias


class TextParameters(Body):
    """What chats and completions have in common."""

    model: str | None = Field(None, max_length=256, description="The served model, or nothing.")
    n: StrictInt = Field(1, ge=1, le=128, description="How many answers.")
    stream: StrictBool = Field(False, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256, description="Not used by this server.")

    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, gt=0, le=1)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    seed: StrictInt | None = Field(None, ge=0, le=MAX_SEED)
    stop: Stop | None = Field(None, description="Strings at which the text ends.")
    logit_bias: (
        Annotated[
            dict[str, Annotated[Finite, Field(ge=-100, le=100)]],
            Field(max_length=300),
            AfterValidator(_check_logit_bias),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None

    # vLLM's own
    top_k: StrictInt | None = Field(None, ge=0, le=MAX_TOKENS)
    min_p: Finite | None = Field(None, ge=0, le=1)
    # Next to 0 it makes numbers that are none of the logits, and any token is as good.
    repetition_penalty: Finite | None = Field(None, ge=0.01, le=10)
    min_tokens: StrictInt | None = Field(None, ge=0, le=MAX_TOKENS)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    structured_outputs: StructuredOutputs | None = None

    # ours
    timeout: Finite | None = Field(
        None, gt=0, le=1e9, description="Seconds from arrival; then 504 is the answer."
    )


def _check_modalities(modalities: list[Modality]) -> list[Modality]:
    if "audio" in modalities:
        raise _fail("audio is not supported: no model here makes it")
    if "text" not in modalities:
        raise _fail("a picture alone comes from /v1/images/generations; here it is text, or both")
    return modalities


class ChatRequest(TextParameters, PictureParameters):
    """POST /v1/chat/completions. The picture's parameters are for modalities text and image."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    modalities: Annotated[
        list[Modality], Field(min_length=1, max_length=3), AfterValidator(_check_modalities)
    ] = Field(["text"], description='["text"], or ["text", "image"] for a text and its picture.')
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None

    @property
    def wants_image(self) -> bool:
        return "image" in self.modalities


Prompt = str | list[int]


def _to_prompts(prompt: Any) -> Any:
    """One prompt or several, each a string or token ids, as a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return [prompt]
    return prompt


def _is_text(prompt: Any) -> bool:
    """Whether it is a string, of whole characters."""
    return isinstance(prompt, str) and not any("\ud800" <= char <= "\udfff" for char in prompt)


def _check_prompts(prompts: list[Any]) -> list[Any]:
    for prompt in prompts:
        is_tokens = isinstance(prompt, list) and all(
            type(token) is int and 0 <= token <= MAX_TOKENS for token in prompt
        )
        if not (is_tokens or _is_text(prompt)) or not prompt:
            raise _fail("a string, token ids, or a list of either; none may be empty")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise _fail("strings and token ids cannot be mixed")
    return prompts


class CompletionRequest(TextParameters):
    """POST /v1/completions."""

    prompt: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_PROMPTS),
        AfterValidator(_check_prompts),
        BeforeValidator(
            _to_prompts,
            json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]],
        ),
    ]
    max_tokens: StrictInt = Field(16, ge=0, le=MAX_TOKENS, description="0 only with echo.")
    echo: StrictBool = Field(False, description="Give the prompt before the text.")
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


# --- what it gets back; vLLM makes these, the names are for the OpenAPI document ---


class TextUsage(BaseModel):
    """Tokens read and written; those of a picture are its latents'."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int] | None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    images: list[ImagePart] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str | None = None


class CalledTool(BaseModel):
    """A piece of a call: later ones of the same index go on with its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledTool] | None = None
    images: list[ImagePart] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """What is new in a chat that is streamed."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TextUsage | None = None


class CompletionChunk(BaseModel):
    """What is new in a completion that is streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage | None = None
