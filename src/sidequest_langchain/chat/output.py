"""What the engine generated as LangChain's messages, chunks and metadata.

It must not know how it was generated. A streamed answer is the invoked one in pieces: chunks of
text, of reasoning and of tool calls, and one empty chunk at the end that carries everything
else, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from sidequest_langchain.chat.answer import Answer
from sidequest_langchain.chat.call import Call
from sidequest_langchain.engine.request import (
    Finished,
    GenerationRequest,
    GenerationResult,
    TextDelta,
    TokenLogprob,
)

PROVIDER = "sidequest"


def chat_result(call: Call, results: Sequence[GenerationResult], model_name: str) -> ChatResult:
    """All samples of one call, which has ended."""
    acts = call.managed.counts()
    generations = []
    for request, result in zip(call.requests, results, strict=True):
        answer = call.answer_to(request)
        message = AIMessage(
            id=request.label.call_id,
            **answer.whole(result.text),
            usage_metadata=_usage(result, answer, call),
            response_metadata=_metadata(request, result, answer, model_name, acts)
            | _logprobs(request, result.logprobs),
        )
        reason = _finish_reason(result, answer)
        generations.append(
            ChatGeneration(message=message, generation_info={"finish_reason": reason})
        )
    n_in, n_out = results[0].n_prompt_tokens, sum(r.n_generated_tokens for r in results)
    return ChatResult(
        generations=generations,
        llm_output={"token_usage": _token_usage(n_in, n_out), "model_name": model_name},
    )


class ChunkMaker:
    """Makes the chunks of one streamed answer."""

    def __init__(self, call: Call, request: GenerationRequest, model_name: str) -> None:
        self._call = call
        self._request = request
        self._model_name = model_name
        self._answer = call.answer_to(request)

    def chunks_of(self, event: TextDelta | Finished) -> Iterator[ChatGenerationChunk]:
        """The chunks that one event of the engine makes."""
        if isinstance(event, TextDelta):
            # Log-probabilities become known with the text or before it, but never behind it.
            logprobs = _logprobs(self._request, event.logprobs)
            chunks = list(self._answer.feed(event.text))
            if logprobs and not chunks:
                chunks = [AIMessageChunk(content="")]
            for chunk in chunks:
                chunk.response_metadata, logprobs = logprobs, {}
                yield self._own(chunk)
            return
        for chunk in self._answer.finish():
            yield self._own(chunk)
        yield self._last(event.result)

    def _last(self, result: GenerationResult) -> ChatGenerationChunk:
        answer, acts = self._answer, self._call.managed.counts()
        chunk = AIMessageChunk(
            content="",
            usage_metadata=_usage(result, answer, self._call),
            response_metadata=_metadata(self._request, result, answer, self._model_name, acts)
            | _logprobs(self._request, ()),
            chunk_position="last",
        )
        info = {"finish_reason": _finish_reason(result, answer)}
        return self._own(chunk, info)

    def _own(
        self, chunk: AIMessageChunk, info: dict[str, Any] | None = None
    ) -> ChatGenerationChunk:
        chunk.id = self._request.label.call_id
        return ChatGenerationChunk(message=chunk, generation_info=info)


def summed_usage(usages: Sequence[dict[str, int]]) -> dict[str, int]:
    """Token usage of several prompts together."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(usage[name] for usage in usages) for name in names}


def _usage(result: GenerationResult, answer: Answer, call: Call) -> UsageMetadata:
    """`cache_read` counts the tokens whose K/V was there, `cache_creation` those computed."""
    usage = UsageMetadata(
        input_tokens=result.n_prompt_tokens,
        output_tokens=result.n_generated_tokens,
        total_tokens=result.n_prompt_tokens + result.n_generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=result.n_reused_tokens, cache_creation=result.n_prefilled_tokens
        ),
    )
    n_thought = answer.n_thought_tokens(result, call.engine.tokenizer)
    if n_thought:
        usage["output_token_details"] = OutputTokenDetails(reasoning=n_thought)
    return usage


def _finish_reason(result: GenerationResult, answer: Answer) -> str:
    if result.finish_reason == "stop" and answer.has_calls:
        return "tool_calls"
    return result.finish_reason


def _token_usage(n_in: int, n_out: int) -> dict[str, int]:
    return {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}


def _metadata(
    request: GenerationRequest,
    result: GenerationResult,
    answer: Answer,
    model_name: str,
    acts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    problems = answer.problems
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": _finish_reason(result, answer),
        "token_usage": _token_usage(result.n_prompt_tokens, result.n_generated_tokens),
        "sidequest": {
            "call_id": request.label.call_id,
            "path": request.label.path_id,
            "segment": result.segment_id,
            "reused_tokens": result.n_reused_tokens,
            "prefilled_tokens": result.n_prefilled_tokens,
            "queue_s": result.queue_s,
            "first_token_s": result.first_token_s,
            "total_s": result.total_s,
            **({} if acts is None else {"managed": dict(acts)}),
            **({"invalid_tool_calls": problems} if problems else {}),
            **({} if result.clearing is None else {"clearing": result.clearing.to_json()}),
        },
    }


def _logprobs(request: GenerationRequest, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """In the shape of OpenAI's; nothing if none were asked for."""
    if request.sampling.top_logprobs is None:
        return {}
    content = [
        {
            **_token(one.token, one.raw, one.logprob),
            "top_logprobs": [_token(text, raw, logprob) for _, text, raw, logprob in one.top],
        }
        for one in logprobs
    ]
    return {"logprobs": {"content": content}}


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(raw), "logprob": logprob}
