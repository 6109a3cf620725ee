"""What the engine generated as LangChain's messages, chunks and metadata.

It must not know how it was generated. A streamed answer is the invoked one in pieces: chunks of
text, and one empty chunk at the end that carries everything else, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from sidequest_langchain.chat.managed import ManagedActs
from sidequest_langchain.engine.request import (
    Finished,
    GenerationRequest,
    GenerationResult,
    TextDelta,
    TokenLogprob,
)

PROVIDER = "sidequest"


def chat_result(
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    model_name: str,
    managed: ManagedActs,
) -> ChatResult:
    """All samples of one call, which has ended."""
    acts = managed.counts()
    generations = [
        ChatGeneration(
            message=AIMessage(
                content=result.text,
                id=request.label.call_id,
                usage_metadata=_usage(result),
                response_metadata=_metadata(request, result, model_name, acts)
                | _logprobs(request, result.logprobs),
            ),
            generation_info={"finish_reason": result.finish_reason},
        )
        for request, result in zip(requests, results, strict=True)
    ]
    n_in, n_out = results[0].n_prompt_tokens, sum(r.n_generated_tokens for r in results)
    return ChatResult(
        generations=generations,
        llm_output={"token_usage": _token_usage(n_in, n_out), "model_name": model_name},
    )


def chunks_of(
    event: TextDelta | Finished,
    request: GenerationRequest,
    model_name: str,
    managed: ManagedActs,
) -> Iterator[ChatGenerationChunk]:
    """The chunks that one event of the engine makes."""
    call_id = request.label.call_id
    if isinstance(event, TextDelta):
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content=event.text,
                id=call_id,
                response_metadata=_logprobs(request, event.logprobs),
            )
        )
        return
    result = event.result
    yield ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            id=call_id,
            usage_metadata=_usage(result),
            response_metadata=_metadata(request, result, model_name, managed.counts())
            | _logprobs(request, ()),
            chunk_position="last",
        ),
        generation_info={"finish_reason": result.finish_reason},
    )


def summed_usage(usages: Sequence[dict[str, int]]) -> dict[str, int]:
    """Token usage of several prompts together."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(usage[name] for usage in usages) for name in names}


def _usage(result: GenerationResult) -> UsageMetadata:
    """`cache_read` counts the tokens whose K/V was there, `cache_creation` those computed."""
    return UsageMetadata(
        input_tokens=result.n_prompt_tokens,
        output_tokens=result.n_generated_tokens,
        total_tokens=result.n_prompt_tokens + result.n_generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=result.n_reused_tokens, cache_creation=result.n_prefilled_tokens
        ),
    )


def _token_usage(n_in: int, n_out: int) -> dict[str, int]:
    return {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}


def _metadata(
    request: GenerationRequest,
    result: GenerationResult,
    model_name: str,
    acts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
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
