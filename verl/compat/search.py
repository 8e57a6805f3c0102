"""Search as a tool: over a service with the contract of Search-R1, or over a file of texts by BM25.

The service answers POST {"queries": [...], "topk": 3, "return_scores": true} with
{"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.2}, ...], ...]}.
"""

import asyncio
import json
from functools import cache
from typing import Any

from verl.errors import ConfigError, MissingExtraError
from verl.registry import user_file
from verl.regular_files import require_regular
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import Answer
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, text_tool

MAX_QUERIES = 10


class SearchTool(BaseTool):
    """`config`: either `retrieval_service_url`, or `corpus`, a .jsonl file with {"contents": text} in each line, for BM25
    (extra `search`); `topk` documents for each query; `timeout` seconds; `num_workers` queries to the service at once."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        about = "Searches for documents that are relevant to the queries."
        texts = {"type": "array", "items": {"type": "string"}}
        schema = tool_schema or text_tool("search", about, "query_list", "the queries, one text each", **texts)
        super().__init__(config, schema)
        self.url, self.corpus = config.get("retrieval_service_url"), config.get("corpus")
        if bool(self.url) == bool(self.corpus):
            raise ConfigError("A search tool needs either retrieval_service_url or corpus in its config.")
        self.topk, self.timeout_s = int(config.get("topk", 3)), float(config.get("timeout", 30))
        self._slots = asyncio.Semaphore(int(config.get("num_workers", 16)))
        if self.corpus:
            bm25_index(str(self.corpus))

    async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> Answer:
        queries = parameters["query_list"]
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ValueError("query_list must be a list of texts")
        results = await self._found(queries[:MAX_QUERIES])
        texts = [
            "\n\n".join(f"Doc {i + 1}: {_text(document)}" for i, document in enumerate(documents))
            for documents in results
        ]
        return ToolResponse(text=json.dumps({"result": "\n---\n".join(texts)}, ensure_ascii=False)), 0.0, {}

    async def _found(self, queries: list[str]) -> list[list[Any]]:
        if self.corpus:
            return [bm25_index(str(self.corpus)).search(query, self.topk) for query in queries]
        import httpx

        from verl.rollout.http.client import tls_context

        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        async with self._slots, httpx.AsyncClient(timeout=self.timeout_s, verify=tls_context()) as client:
            answer = await client.post(str(self.url), json=body)
        answer.raise_for_status()
        result = answer.json().get("result")
        if not isinstance(result, list):
            raise ValueError("the search service answered without a list `result`")
        return result


def _text(document: object) -> str:
    return str(document["document"]["contents"]) if isinstance(document, dict) else str(document)


class BM25Index:
    """Texts that can be searched. `search` answers in the service's format."""

    def __init__(self, texts: list[str]):
        try:
            import bm25s
        except ImportError:
            raise MissingExtraError("A search tool with a corpus", "search", "bm25s") from None
        self.texts, self._bm25s = texts, bm25s
        self._index = bm25s.BM25()
        self._index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def search(self, query: str, topk: int) -> list[dict[str, object]]:
        """The documents with the highest scores, best first; none for a query without a known word."""
        tokens = self._bm25s.tokenize(query, stopwords="en", show_progress=False)
        if not tokens.vocab:
            return []
        places, scores = self._index.retrieve(tokens, k=min(topk, len(self.texts)), show_progress=False)
        return [
            {"document": {"contents": self.texts[place]}, "score": float(score)}
            for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True)
            if score > 0
        ]


@cache
def bm25_index(path: str) -> BM25Index:
    """The index of a .jsonl file. Raises ConfigError for a file that cannot be used."""
    try:
        text = require_regular(user_file(path), "The corpus").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        texts = [str(row["contents"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The corpus {path} cannot be used: {error}. Each line is an object with `contents`."
        ) from error
    if not texts:
        raise ConfigError(f"The corpus {path} has no lines.")
    return BM25Index(texts)
