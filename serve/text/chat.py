"""Chat prompts in, chat answers out: the V4.1 encoding, rendered and parsed by deepseek-recipe."""

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from rorqual.serve.text.tokenizer import PromptTooLong, Tokenizer, TokenizerError

IMAGE_TOKEN = "<｜deepseek_image｜>"
TEXTLESS_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
"""Never part of an answer, even where a request lets the model run past the end."""

CHAT_TOKENS = (*TEXTLESS_TOKENS, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
MAX_ERROR_CHARS = 400


class ChatError(ValueError):
    """A chat request that cannot become a prompt. `field` names the part of the body at fault."""

    def __init__(self, field: str, message: str) -> None:
        shown = message if len(message) <= MAX_ERROR_CHARS else message[:MAX_ERROR_CHARS] + "..."
        super().__init__(f"{field}: {shown}")
        self.field = field


class ChatPrompt:
    """A rendered chat request: `ids` is the prompt; the rest is what answering it needs."""

    def __init__(self, request: recipe.ConversationRequest, ids: list[int]) -> None:
        self.request = request
        self.ids = ids

    @property
    def temperature(self) -> float:
        """Temperature for this kind of conversation where nobody states one."""
        return 1.0

    @property
    def top_p(self) -> float:
        """Top-p for this kind of conversation where nobody states one."""
        resolved = self.request.inference_options.top_p
        return 1.0 if resolved is None else resolved

    def default_max_tokens(self, max_context: int) -> int:
        """Answer length where the request states none: by thinking mode and effort, capped by the room left."""
        return self.request.resolve_max_tokens(len(self.ids), max_context)


class ChatFormat:
    """The chat side of one checkpoint; shared by all requests and threads.

    Raises:
        TokenizerError: the tokenizer lacks control tokens of the V4.1 chat encoding; the message lists them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [spelling for spelling in CHAT_TOKENS if tokenizer.token_id(spelling) is None]
        if missing:
            raise TokenizerError(f"the checkpoint's tokenizer lacks the chat tokens {', '.join(missing)}")
        self.tokenizer = tokenizer
        self.textless_ids = frozenset(tokenizer.token_id(spelling) for spelling in TEXTLESS_TOKENS)
        special = recipe.SpecialTokens(image=IMAGE_TOKEN)
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(special)
        version = {"model": recipe.ModelVersion.DeepseekV41Flash}
        self._options = recipe.ConversionOptions().with_special_tokens(special).with_model_versions_by_name(version)
        self._decoder = recipe.Tokenizer.from_str(tokenizer.source)

    def prompt(self, body: Mapping[str, Any], allowed: int) -> ChatPrompt:
        """Render and encode a conversation.

        Args:
            body: `messages` and, where stated, `reasoning_effort`, `thinking`, `logprobs`, `top_logprobs`, `stream` of
                a chat completions request.
            allowed: largest number of prompt tokens.
        Raises:
            ChatError: the conversation is malformed or holds something unsupported.
            PromptTooLong: more than `allowed` tokens; found early for very long texts.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            found = "an empty list" if isinstance(messages, list) else type(messages).__name__
            raise ChatError("messages", f"{found}, allowed a list of 1 message and more")
        least = self.tokenizer.least_tokens(_num_text_chars(messages))
        if least > allowed:
            raise PromptTooLong(least, allowed)
        try:
            request = recipe.ChatCompletionRequest({**body, "model": "model"}).convert(self._options)
            rendered = self._encoding.render_conversation(request.conversation)
        except recipe.ConversionError as error:
            raise ChatError("messages", _message_of(error.body)) from error
        except UnicodeEncodeError as error:
            raise ChatError("messages", "a lone surrogate, allowed Unicode text") from error
        except (ValueError, OverflowError) as error:
            raise ChatError("messages", str(error)) from error
        if rendered.image_sources:
            raise ChatError("messages", f"images are not supported: {len(rendered.image_sources)} of them, allowed 0")
        return ChatPrompt(request, self._encode(rendered, allowed))

    def processor(self, prompt: ChatPrompt, answer_id: str, model: str, stop: tuple[str, ...]) -> Any:
        """The library's stream processor for the answer to `prompt`. Stop strings apply to the answer's content."""
        options = prompt.request.parsing_options
        options.stop_sequences = list(stop)
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, answer_id, model)
        return recipe.StreamProcessor(generator, options, self._decoder)

    def _encode(self, rendered: recipe.RenderedPrompt, allowed: int) -> list[int]:
        """Control tokens only in the ranges that the renderer names; all else is plain text."""
        text, ids, end = rendered.prompt, list[int](), 0
        for start, stop in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
            if start > end:
                room = allowed - len(ids)
                try:
                    ids += self.tokenizer.encode(text[end:start], room)
                except PromptTooLong as error:
                    raise PromptTooLong(len(ids) + error.num_tokens, allowed) from error
            if stop > start:
                ids.append(self._control_id(text[start:stop]))
            end = stop
        if len(ids) > allowed:
            raise PromptTooLong(len(ids), allowed, exact=True)
        return ids

    def _control_id(self, spelling: str) -> int:
        token_id = self.tokenizer.token_id(spelling)
        if token_id is None:
            raise ChatError("messages", f"needs the control token {spelling}, which the checkpoint's tokenizer lacks")
        return token_id


def _num_text_chars(messages: list[Any]) -> int:
    """Characters of message texts: a lower bound of the prompt's bytes, at no cost."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            total += len(text) if isinstance(text, str) else 0
    return total


def _message_of(body: str) -> str:
    """The message inside the library's error body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body
